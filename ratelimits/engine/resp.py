"""Commands as bytes, in RESP: building one needs no socket."""

from __future__ import annotations

from typing import Protocol

from ratelimits.engine.scripts import Script


def bulks(*parts: bytes) -> bytes:
    """Return bulk strings in RESP, one after the other."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def resp(*parts: bytes) -> bytes:
    """Return a command in RESP."""
    return b"*%d\r\n" % len(parts) + bulks(*parts)


def loading(script: Script) -> bytes:
    """Return the command that loads a script into the server."""
    return resp(b"SCRIPT", b"LOAD", script.text)


class Sendable(Protocol):
    """A command that can be sent: it has a script, and bytes for a run of the server and a nonce."""

    @property
    def script(self) -> Script: ...

    def to(self, run: str, name: bytes) -> bytes:
        """Return the command in RESP."""
