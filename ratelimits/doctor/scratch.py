"""The Redis keys on which the doctor tries a server: a place beside the project's keys, which is deleted afterwards.

The names begin like those of a real shard, so a user who may touch only the project's keys may touch them too, and in a
cluster they are on the node of this shard. No other code reads them. If the process is killed, they expire: the doctor
sends the app's scripts with a few more lines, which give each key a time to live in the same step.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from redis.exceptions import RedisError

from ratelimits.doctor.commands import KEYS
from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.scripts import Script, Sendable
from ratelimits.engine.keys import SHARD_KEYS, Keyspace
from ratelimits.engine.server import Server
from ratelimits.engine.transport.wire import Wire

#: After this number of ms, the Redis keys of a killed doctor expire.
TIME_TO_LIVE = 600_000


@dataclass(frozen=True, slots=True)
class ScratchKeyspace(Keyspace):
    """The Redis keys of the doctor. They are like those of a namespace with one shard, but begin with `home`."""

    home: str = ""

    def prefix(self, shard: int) -> str:
        return self.home


@dataclass(frozen=True, slots=True)
class Scratch:
    """The connections to one server, and the Redis keys of the doctor on it."""

    wire: Wire
    keyspace: ScratchKeyspace
    #: The connections to all servers, if the server is a node of a cluster; otherwise the same as `wire`.
    all_servers: Wire
    #: The Redis keys that were perhaps written, as a set that keeps the order.
    written: dict[str, None] = field(default_factory=dict)
    #: Whether the app may use the reserve of this server if its memory is full (see engine/memory.py).
    may_use_reserve: bool = False

    @property
    def server(self) -> Server:
        """Return the server with the doctor's Redis keys, for functions of the app."""
        return Server(self.wire, self.keyspace)

    @property
    def client(self) -> Any:
        return self.wire.client

    def key(self, name: str) -> str:
        """Return a Redis key with this name, and note that it is perhaps written."""
        key = self.keyspace.home + name
        self.written[key] = None
        return key

    def clean(self) -> bool:
        """Delete all Redis keys of the doctor. Return whether the server has done so."""
        if self.written:
            with contextlib.suppress(RedisError, OSError):
                self.client.unlink(*self.written)
                return True
        return not self.written


def scratch(server: Server, shard: int, *, may_use_reserve: bool = False) -> Scratch:
    """Return a new place for the doctor on the server that has this shard."""
    keyspace = server.keyspace
    # The first part in braces says in which slot of a cluster a key is. The scripts read a prefix as far as "}:".
    home = f"{keyspace.prefix(shard).removesuffix(':')}doctor-{secrets.token_hex(6)}}}:"
    scratch_keyspace = ScratchKeyspace(keyspace.namespace, 1, keyspace.slots_move, home)
    wire = server.wire.wire_of(keyspace, shard)
    place = Scratch(wire, scratch_keyspace, server.wire, may_use_reserve=may_use_reserve)
    for name in (*SHARD_KEYS.values(), *map(name_of, KEYS), "prefetched", "fence"):
        place.key(name)
    return place


def name_of(placeholder: str) -> str:
    """Return the name of the Redis key for which an argument such as "<hash>" stands."""
    return f"try-{placeholder.strip('<>')}"


@cache
def expiring(script: Script) -> Script:
    """Return a script that does the same, and then gives the keys of its shard a time to live."""
    end = scripts.text("doctor/expire", {**SHARD_KEYS, "ttl": str(TIME_TO_LIVE)})
    return scripts.script(f"local function app()\n{script.text.decode()}\nend\nlocal reply = app()\n{end}")


class Expiring:
    """A command of the app, with the script that gives its keys a time to live."""

    def __init__(self, command: Sendable) -> None:
        self.script = expiring(command.script)
        self._command = command

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP. Both digests have the same length."""
        return self._command.to_bytes(run, nonce).replace(self._command.script.sha, self.script.sha, 1)
