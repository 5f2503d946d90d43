"""Build commands in RESP, the protocol of Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ratelimits.engine.assemble.scripts import Script

#: What is before the SHA-1 of the script in a command that calls it.
_CALLED = b"$7\r\nEVALSHA\r\n$40\r\n"


def bulks(*parts: bytes) -> bytes:
    """Return all parts as bulk strings of RESP, one after another."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def resp(*parts: bytes) -> bytes:
    """Return a command in RESP."""
    return b"*%d\r\n" % len(parts) + bulks(*parts)


def loading(script: Script) -> bytes:
    """Return the command that loads a script into the server."""
    return resp(b"SCRIPT", b"LOAD", script.text)


def evaluating(packed: bytes, script: Script) -> bytes:
    """Return a command that calls a loaded script (EVALSHA) as one that sends the script's text with it (EVAL)."""
    start, rest = packed.split(_CALLED + script.sha + b"\r\n", 1)
    return start + bulks(b"EVAL", script.text) + rest


def loading_first(commands: Sequence[bytes], scripts: Iterable[Script]) -> list[bytes]:
    """Return the commands, of which the first that calls each of these scripts sends the text of the script."""
    given, missing = list(commands), {script.sha: script for script in scripts}
    for place, packed in enumerate(given):
        if not missing:
            break
        _start, called, rest = packed.partition(_CALLED)
        if called and (script := missing.pop(rest[:40], None)) is not None:
            given[place] = evaluating(packed, script)
    return given


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
