"""Plain commands for tests of the connections."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from ratelimits.engine.assemble.scripts import Script, resp
from ratelimits.engine.transport.wire import Wire

#: Seconds for a reply in tests that wait for one in vain; in all others a busy machine may take its time.
TIMEOUT, PATIENT = 0.25, 10.0


@dataclass
class Said:
    """A plain command, and the runs of the server for which it was made."""

    words: tuple[bytes, ...]
    script: Script = field(default_factory=lambda: Script(b"", b""))
    runs: list[str] = field(default_factory=list)

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        self.runs.append(run)
        return resp(*self.words)


def say(*words: bytes) -> Said:
    return Said(words)


def script_call(text: bytes, *words: bytes) -> Said:
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()
    return Said((b"EVALSHA", sha, *words), Script(text, sha))


COUNT = b"return redis.call('INCR', KEYS[1])"
WHO = say(b"CLIENT", b"ID")


def let_be_idle(wire: Wire, seconds: float) -> None:
    """Let all connections of a wire seem idle for so many seconds longer."""
    for owned in wire._idle._idle if wire._idle is not None else ():
        owned.used -= seconds
    let_pool_be_idle(wire._pool, seconds)
    for shared, _end in wire._loops.values():
        if shared._link is not None:
            shared._link._used -= seconds


def let_pool_be_idle(pool: Any, seconds: float) -> None:
    """Do the same with the connections of one pool."""
    for connection, moments in list(pool._moments.items()):
        pool._moments[connection] = moments._replace(used=moments.used - seconds)


def let_be_old(wire: Wire, seconds: float) -> None:
    """Let all connections of a wire seem older by so many seconds."""
    for owned in wire._idle._idle if wire._idle is not None else ():
        owned.until -= seconds
    let_pool_be_old(wire._pool, seconds)
    for shared, _end in wire._loops.values():
        if shared._link is not None:
            shared._link._until -= seconds


def let_pool_be_old(pool: Any, seconds: float) -> None:
    """Do the same with the connections of one pool."""
    for connection, moments in list(pool._moments.items()):
        pool._moments[connection] = moments._replace(until=moments.until - seconds)
