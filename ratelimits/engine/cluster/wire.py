"""Connect to a Redis Cluster: find the node of each slot, and send calls whose keys are on several nodes."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis
from django.core.exceptions import ImproperlyConfigured
from redis.cluster import RedisCluster
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError

from ratelimits.engine.assemble.scripts import HasKey, Script, Sendable, resp
from ratelimits.engine.cluster.split import Reply, Sending, parts, slot_of, steps
from ratelimits.engine.command import Command
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.transport.breaker import Breaker, NodeNotSent, NodeUnanswered, SlotNotReached, prober
from ratelimits.engine.transport.connection import NotReached, NotSent, Unanswered, Unavailable
from ratelimits.engine.transport.wire import Wire

#: The host and the port of a node.
Address = tuple[str, int]
#: The primary node of each slot; None if it is not known.
Table = list[Address | None]
#: One lock for all clusters. A forked child gets a new lock: perhaps a thread of the parent held the lock at the fork.
_lock = threading.Lock()
#: Arguments that redis-py's cluster client adds to its connections. The connections of this module do not get them.
_ADDED_BY_CLIENT = ("himport_registry", "redis_connect_func", "cache")


#: The first version of redis-py whose connections know the errors of a cluster, such as MOVED.
_FIRST_VERSION = (6, 0)


def problem_of_redis_py() -> str:
    """Return why the installed version of redis-py cannot use a cluster; "" if it can."""
    numbers = redis.__version__.split(".")[:2]
    if all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) < _FIRST_VERSION:
        first = ".".join(map(str, _FIRST_VERSION))
        return (
            f"A Redis Cluster needs version {first} or newer of the Python package redis, but {redis.__version__} is"
            " installed."
        )
    return ""


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


class _Slots:
    """The command CLUSTER SLOTS. (Redis 6.2 does not have CLUSTER SHARDS, which is newer.)"""

    script = Script(b"", b"")  # the command needs no script

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        return resp(b"CLUSTER", b"SLOTS")


def owners(rows: Sequence[Any], asked: Address, remap: Callable[[Address], Address] | None) -> Table:
    """Return the primary node of each slot. `rows` is the reply to CLUSTER SLOTS of the node at `asked`."""
    owners_of_slots: Table = [None] * REDIS_CLUSTER_HASH_SLOTS
    for start, end, (host, port, *_more), *_replicas in rows:
        # A node that does not know its own host sends no host. Then use the host under which the node was asked.
        address = (host.decode() if host and host != b"?" else asked[0], int(port))
        if remap is not None:
            address = remap(address)
        owners_of_slots[start : end + 1] = [address] * (end - start + 1)
    return owners_of_slots


class _Node(Wire):
    """The connections to one node, and its circuit breaker, which stops calls for a second after several failures.

    Each node has its own breaker, so a failing node does not stop calls to other nodes.
    """

    def __init__(self, pool: Any, timeout: float, is_away: Callable[[], None]) -> None:
        self._open(pool, timeout)
        #: Called at each probe that fails, about once a second.
        self._is_away = is_away
        self.breaker = Breaker(probe=self.probe)

    def probe(self) -> None:
        """Raise an error also if the node has started, but does not answer for its slots yet."""
        try:
            super().probe()
            state = self._asked("CLUSTER", "INFO")
            if state is not None and "cluster_state:ok" not in state:
                raise NotSent("the node does not serve its slots yet")
        except BaseException:
            self._is_away()
            raise


class ClusterWire(Wire):
    """The connections to the nodes of a cluster. After an error, ask the nodes again which node has which slots."""

    def __init__(self, source: RedisCluster, timeout: float) -> None:
        manager: Any = source.nodes_manager
        if problem := problem_of_redis_py():
            raise ImproperlyConfigured(problem)
        if source.read_from_replicas or source.load_balancing_strategy:
            raise ImproperlyConfigured(
                "a cluster's replicas cannot decide: leave out read_from_replicas and load_balancing_strategy"
            )
        self._seeds: list[Address] = [(node.host, node.port) for node in manager.startup_nodes.values()]
        pool_of_node = manager.create_redis_node(*self._seeds[0], **manager.connection_kwargs).connection_pool
        for name in _ADDED_BY_CLIENT:
            pool_of_node.connection_kwargs.pop(name, None)
        #: A pool whose class and arguments are used for the pools of all nodes.
        self._example_pool = pool_of_node
        #: The project's function that replaces the address of a node by another address; None if there is none.
        self._remap = manager.address_remap
        self._timeout = timeout
        self._nodes: dict[Address, _Node] = {}
        self._owners: Table | None = None
        self._members: list[Address] = []
        #: The node that failed last. It is asked for the slots only after all other nodes.
        self._last_failed: Address | None = None
        #: The configured client. It can send a command twice. So sealing, draining and publishing use only
        #: the clients of `servers` and `client_of`.
        self.client = cast("Any", source)

    def probe(self) -> None:
        """Raise an error if no node answers. Each node has a breaker of its own, and is probed for it."""
        self._learn_slots(())

    def _node(self, address: Address) -> _Node:
        node = self._nodes.get(address)
        if node is None:
            with _lock:
                node = self._nodes.get(address)
                if node is None:
                    host, port = address
                    kwargs = {**self._example_pool.connection_kwargs, "host": host, "port": port}
                    pool = redis.ConnectionPool(connection_class=self._example_pool.connection_class, **kwargs)
                    node = self._nodes[address] = _Node(pool, self._timeout, self._forget_owners)
        return node

    def _forget_owners(self) -> None:
        """Let the next call ask for the slots: perhaps another node has those of a node that does not answer."""
        self._owners = None

    def _candidates(self) -> list[Address]:
        """Return the nodes to ask for the slots, the best node first.

        First come the known members, then other nodes with connections, then the nodes of the settings. But the node
        that failed last comes at the end.
        """
        candidates = list(dict.fromkeys([*self._members, *self._nodes, *self._seeds]))
        return sorted(candidates, key=lambda address: address == self._last_failed)

    def _learn_slots(self, slots: Iterable[int]) -> Table:
        """Return the table of the first node that knows the owners of these slots.

        If no node knows all of these owners, return the table of the first node that answers. Raise NotReached if no
        node answers.
        """
        best: Table | None = None
        failure: Exception | None = None
        for address in self._candidates():
            try:
                with self._asking(address) as node:
                    rows = node.call(_Slots(), b"")
            except (Unavailable, ResponseError) as error:
                failure = error
                continue
            table = owners(rows, address, self._remap)
            if all(table[slot] for slot in slots):
                return self._store_table(table)
            # A node that is not in the cluster any more returns no rows.
            best = best or (table if rows else None)
        return self._store_table(best, failure)

    async def _alearn_slots(self, slots: Iterable[int]) -> Table:
        """Do the same as `_learn_slots`, in async code."""
        best: Table | None = None
        failure: Exception | None = None
        for address in self._candidates():
            try:
                with self._asking(address) as node:
                    rows = await node.acall(_Slots(), b"")
            except (Unavailable, ResponseError) as error:
                failure = error
                continue
            table = owners(rows, address, self._remap)
            if all(table[slot] for slot in slots):
                return self._store_table(table)
            best = best or (table if rows else None)
        return self._store_table(best, failure)

    def _store_table(self, table: Table | None, failure: Exception | None = None) -> Table:
        """Store and return a new table. Raise NotReached if no node has sent a table."""
        if table is None:
            raise NotReached(f"no node of the cluster answers: {failure}") from failure
        with _lock:
            self._owners, self._members = table, [address for address in dict.fromkeys(table) if address]
            former, self._nodes = (
                self._nodes,
                {known: self._nodes[known] for known in self._nodes if known in self._members},
            )
            for address in former.keys() - self._nodes.keys():
                prober.forget(former[address].breaker)
        return table

    @contextmanager
    def _asking(self, address: Address) -> Iterator[_Node]:
        """Yield the node at `address`, and handle the errors of a call to this node.

        If the node does not answer, or cannot answer for the slot now, raise an error that names the node, and forget
        the owners of all slots. The next call then asks for the owners. Raise all other errors unchanged.
        """
        node = self._node(address)
        if not node.breaker.closed:
            raise NodeNotSent(f"{_host_and_port(address)} did not answer just now")
        try:
            yield node
        except MovedError:
            raise
        except (AskError, TryAgainError) as error:
            self._owners = None
            raise NodeNotSent(
                f"the slot is being moved from {_host_and_port(address)} to another node: {error}"
            ) from error
        except ClusterDownError as error:
            self._owners = None
            raise NodeNotSent(f"the cluster is down, says {_host_and_port(address)}: {error}") from error
        except Unavailable as error:
            node.breaker.failed(error.event)
            self._owners, self._last_failed = None, address
            error_class = NodeUnanswered if isinstance(error, Unanswered) else NodeNotSent
            raise error_class(f"{_host_and_port(address)}: {error}", error.event) from error
        else:
            node.breaker.succeeded()

    def _moved(self, slot: int, asked: Address, error: MovedError) -> Address:
        """Store and return the slot's new owner, which the error names.

        Do not ask the nodes for the owner: perhaps other nodes do not know it yet.
        """
        owner = (error.host or asked[0], error.port)
        owner = owner if self._remap is None else self._remap(owner)
        if self._owners is not None:
            self._owners[slot] = owner
        return owner

    def _send(self, slot: int, command: Sendable, nonce: bytes) -> Any:
        table = self._owners
        if table is None or table[slot] is None:
            table = self._learn_slots((slot,))
        address = _owner(table, slot)
        for is_second_try in (False, True):
            try:
                with self._asking(address) as node:
                    return node.call(command, nonce)
            except MovedError as error:
                # This node did not carry out the command. Send it once more, to the new owner of the slot.
                if is_second_try:
                    self._owners = None
                    raise NodeNotSent(f"slot {slot} was moved twice: {error}") from error
                address = self._moved(slot, address, error)
        raise AssertionError

    async def _asend(self, slot: int, command: Sendable, nonce: bytes) -> Any:
        table = self._owners
        if table is None or table[slot] is None:
            table = await self._alearn_slots((slot,))
        address = _owner(table, slot)
        for is_second_try in (False, True):
            try:
                with self._asking(address) as node:
                    return await node.acall(command, nonce)
            except MovedError as error:
                if is_second_try:
                    self._owners = None
                    raise NodeNotSent(f"slot {slot} was moved twice: {error}") from error
                address = self._moved(slot, address, error)
        raise AssertionError

    def call(self, command: Sendable, nonce: bytes) -> Any:
        """Send a command to the node that has its keys, and return the reply.

        If the keys are in several slots, send one command for each slot, and make one reply of all replies. Raise the
        errors of `Wire.call`. While a slot moves to another node, raise NotSent.
        """
        route = _slot_or_steps(command, nonce)
        if isinstance(route, int):
            return self._send(route, command, nonce)
        # Send each command that `steps` yields, and give `steps` the reply or the error.
        try:
            slot, part = next(route)
            while True:
                try:
                    reply = self._send(slot, part, nonce)
                except (Unavailable, redis.RedisError) as error:
                    slot, part = route.throw(error)
                else:
                    slot, part = route.send(reply)
        except StopIteration as end:
            return _as_bytes(end.value)

    async def acall(self, command: Sendable, nonce: bytes) -> Any:
        """Do the same as `call`, in async code."""
        route = _slot_or_steps(command, nonce)
        if isinstance(route, int):
            return await self._asend(route, command, nonce)
        try:
            slot, part = next(route)
            while True:
                try:
                    reply = await self._asend(slot, part, nonce)
                except asyncio.CancelledError:
                    # The command for this shard was not written: otherwise `_asend` would wait for its reply and not
                    # raise CancelledError. So give back only permits that were taken in earlier shards.
                    slot, part = route.throw(NodeNotSent("the task that asked was cancelled"))
                except (Unavailable, redis.RedisError) as error:
                    slot, part = route.throw(error)
                else:
                    slot, part = route.send(reply)
        except StopIteration as end:
            return _as_bytes(end.value)

    def stream(self, makers: Sequence[Callable[[str], bytes]], scripts: set[Script]) -> list[Any]:
        """Raise ImproperlyConfigured: the simulator needs one server."""
        raise ImproperlyConfigured("the simulator runs on one server, not on a cluster")

    def servers(self, keyspace: Keyspace, shards: Sequence[int]) -> Iterator[tuple[redis.Redis, list[int]]]:
        """Yield a client for each node, with a list of the given shards that this node has.

        Raise NotReached if no node answers. If there are shards that no node has, raise SlotNotReached at the end.
        """
        node_shards: dict[Address | None, list[int]] = {}
        slots = [slot_of(keyspace, shard) for shard in shards]
        table = self._learn_slots(slots)
        for shard, slot in zip(shards, slots, strict=True):
            node_shards.setdefault(table[slot], []).append(shard)
        without_node = node_shards.pop(None, [])
        for address, shards_of_node in node_shards.items():
            assert address is not None
            yield self._node(address).client, shards_of_node
        for shard in without_node:
            _owner(table, slot_of(keyspace, shard))  # raises SlotNotReached

    def client_of(self, keyspace: Keyspace, shard: int) -> redis.Redis:
        """Return a client for the node that has this shard. Raise the errors of `wire_of`."""
        return self.wire_of(keyspace, shard).client

    def wire_of(self, keyspace: Keyspace, shard: int) -> Wire:
        """Return the connections to the node that has this shard.

        Raise NotReached if no node answers, and SlotNotReached if no node has the shard.
        """
        slot, table = slot_of(keyspace, shard), self._owners
        if table is None or table[slot] is None:
            table = self._learn_slots((slot,))
        return self._node(_owner(table, slot))


def _owner(table: Table, slot: int) -> Address:
    address = table[slot]
    if address is None:
        raise SlotNotReached(f"no node of the cluster has slot {slot}")
    return address


def _host_and_port(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _slot_or_steps(command: Sendable, nonce: bytes) -> int | Sending:
    """Return the slot of a command's keys. If they are in several slots, return the generator `steps`."""
    if isinstance(command, Command):
        all_parts = parts(command)
        return all_parts[0].slot if len(all_parts) == 1 else steps(command, nonce)
    return key_slot(cast("HasKey", command).key)


def _as_bytes(reply: Reply) -> bytes:
    """Return a reply in the form in which one server sends it."""
    return struct.pack(f"<{len(reply)}q", *reply)
