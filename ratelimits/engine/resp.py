"""Build commands in RESP, the protocol of Redis."""

from __future__ import annotations

from typing import Protocol

from ratelimits.engine.assemble.scripts import Script


def bulks(*parts: bytes) -> bytes:
    """Return all parts as bulk strings of RESP, one after another."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def resp(*parts: bytes) -> bytes:
    """Return a command in RESP."""
    return b"*%d\r\n" % len(parts) + bulks(*parts)


def loading(script: Script) -> bytes:
    """Return the command that loads a script into the server."""
    return resp(b"SCRIPT", b"LOAD", script.text)


class Sendable(Protocol):
    """A command that can be sent. If it calls a Lua script, `script` is this script: the server may need to load it."""

    @property
    def script(self) -> Script: ...

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP. `run` is the run of the server, `nonce` the unique name of this call."""


class HasKey(Protocol):
    """A command whose Redis keys are all in one slot of a cluster. `key` is one of them."""

    @property
    def key(self) -> bytes: ...
