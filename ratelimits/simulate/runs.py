"""Let no simulation leave Redis keys behind, also if its process is killed.

The states of a simulation have no time to live, because a simulation can take any time. So each simulation has a *run*:
an entry in a hash of the server, which names the simulation's namespace, and a hash with the names of its states, which
is written before the states. While the process lives, a thread renews the run. A run that nobody has renewed for
KEEP_SECONDS is dead, and `clean` deletes its states. The task `ratelimits.compact`, the command `ratelimits_compact`
and each start of `ratelimits_simulate` call `clean`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.background import Background
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.wire import Wire

#: A run is dead if its process has not renewed it for this number of seconds. It renews it every RENEW_SECONDS.
KEEP_SECONDS, RENEW_SECONDS = 600.0, 60.0
#: Maximum number of names in one command.
_NAMES_AT_ONCE = 1000
#: The namespace of each simulation begins with this text. All of them have one shard, so they are in one slot.
_NAMESPACE = "simulate-"
_RUNNING, _CLEANING = b"running", b"cleaning"


def _list_of_runs() -> str:
    """Return the Redis key of a hash: its fields are the namespaces of all simulations that have perhaps states."""
    return f"{Keyspace(f'{_NAMESPACE}runs', 1).prefix(0)}runs"


def _alive(keyspace: Keyspace) -> str:
    """Return the Redis key of a string that exists while the process of a run lives, or while a run is cleaned."""
    return f"{keyspace.prefix(0)}alive"


def _names(keyspace: Keyspace) -> str:
    """Return the Redis key of a hash: its fields are the Redis keys of a run's states."""
    return f"{keyspace.prefix(0)}names"


class Run:
    """The run of a simulation: its Redis keys, and the proof that its process lives."""

    def __init__(self, wire: Wire) -> None:
        self.keyspace = Keyspace(f"{_NAMESPACE}{secrets.token_hex(8)}", 1)
        #: The connections to the node of this shard, if the server is a cluster.
        self.wire = wire.wire_of(self.keyspace, 0)
        self._client: Any = self.wire.client
        #: The moment of the last renewal (s since 1970 UTC); None if the run has not begun.
        self._renewed_at: float | None = None
        self._is_lost = False

    def note(self, names: Sequence[str]) -> None:
        """Note the Redis keys of states. Call this before the states are written."""
        if self._renewed_at is None:
            self._begin()
        for chunk in _chunks(names):
            self._client.hset(_names(self.keyspace), mapping=dict.fromkeys(chunk, ""))

    def forget(self, names: Sequence[str]) -> None:
        """Delete states, and further Redis keys of their limits."""
        forget(Server(self.wire, self.keyspace), names)
        for chunk in _chunks(names):
            self._client.hdel(_names(self.keyspace), *chunk)

    def _begin(self) -> None:
        self._renewed_at = time.time()
        # Set the proof first: a run without it is dead.
        self._client.set(_alive(self.keyspace), _RUNNING, px=int(KEEP_SECONDS * 1000))
        self._client.hset(_list_of_runs(), self.keyspace.namespace, "")
        _runs.add(self)
        _background.start()

    def end(self) -> None:
        """End the run, after all its states were deleted."""
        _runs.discard(self)
        if self._renewed_at is not None:
            self._renewed_at = None
            _end(self._client, self.keyspace)

    def renew(self) -> None:
        """Prove that the process lives. Find out whether the run was taken for dead."""
        now, alive = time.time(), _alive(self.keyspace)
        proof, listed = self._client.get(alive), self._client.hget(_list_of_runs(), self.keyspace.namespace)
        if listed is None or proof not in (None, _RUNNING):
            self._is_lost = True
        # If nobody has renewed the run in time, but nobody has cleaned it either, it goes on.
        elif self._client.set(alive, _RUNNING, px=int(KEEP_SECONDS * 1000), nx=proof is None, xx=proof is not None):
            self._renewed_at = now

    def check(self) -> None:
        """Raise Unavailable if the states were perhaps deleted while the simulation used them."""
        if self._renewed_at is None:
            return
        # The clock of this machine, because others do not count the time in which the machine sleeps.
        if not 0 <= time.time() - self._renewed_at < KEEP_SECONDS / 2:
            self.renew()
        if self._is_lost:
            raise Unavailable(
                f"the simulation stood still for more than {KEEP_SECONDS / 60:g} minutes, or the server lost its data:"
                " start it again"
            )


def clean(wire: Wire) -> int:
    """Delete the states of dead runs. Return the number of these runs. Raise Unavailable if the server does not answer.

    Several processes may do this at the same time.
    """
    try:
        node = wire.wire_of(Keyspace(f"{_NAMESPACE}runs", 1), 0)
        runs: Any = node.client.hgetall(_list_of_runs())
        return sum(_clean(Server(node, Keyspace(name.decode(), 1))) for name in runs)
    except RedisError as error:
        raise Unavailable(str(error)) from error


def _clean(server: Server) -> bool:
    """Delete the states of a run if it is dead. Return whether it was dead."""
    client: Any = server.wire.client
    if not client.set(_alive(server.keyspace), _CLEANING, px=int(KEEP_SECONDS * 1000), nx=True):
        return False
    names = client.hscan_iter(_names(server.keyspace), count=_NAMES_AT_ONCE)
    for chunk in _chunks(name.decode() for name, _value in names):
        forget(server, chunk)
    _end(client, server.keyspace)
    return True


def _end(client: Any, keyspace: Keyspace) -> None:
    client.unlink(_names(keyspace))
    # The list comes last but one: while it has the run, another process can go on if this one is killed.
    client.hdel(_list_of_runs(), keyspace.namespace)
    client.unlink(_alive(keyspace))


def forget(server: Server, keys: Iterable[str]) -> None:
    """Delete the states with these Redis keys, and the further Redis keys of their limits."""
    endings = {"", *(ending for kind in ALGORITHMS.values() for ending in kind.storage.endings.values())}
    deleted = sorted({key + ending for key in keys for ending in endings})
    for start in range(0, len(deleted), 1000):
        server.wire.client.unlink(*deleted[start : start + 1000])


def _chunks(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while chunk := list(islice(rest, _NAMES_AT_ONCE)):
        yield chunk


#: The runs of this process.
_runs: set[Run] = set()


def _renew_all() -> None:
    for run in list(_runs):
        run.renew()


# A forked child has copies of the runs, which belong to its parent.
os.register_at_fork(after_in_child=_runs.clear)
_background = Background("ratelimits-simulate", lambda: RENEW_SECONDS, _renew_all, lambda: None)
