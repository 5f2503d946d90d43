"""Commands as bytes, in RESP: building one needs no socket."""

from __future__ import annotations

from typing import Protocol

from ratelimits.engine.scripts import Script


def bulks(*parts: bytes) -> bytes:
    """Bulk strings in RESP, one behind the other."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def resp(*parts: bytes) -> bytes:
    """A command in RESP."""
    return b"*%d\r\n" % len(parts) + bulks(*parts)


def loading(script: Script) -> bytes:
    """The command that makes a script known to the server."""
    return resp(b"SCRIPT", b"LOAD", script.text)


class Sendable(Protocol):
    """What can be sent: the script that it calls, and its bytes for a run of the server and a nonce."""

    @property
    def script(self) -> Script: ...

    def to(self, run: str, name: bytes) -> bytes:
        """The command in RESP."""
