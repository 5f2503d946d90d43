"""Run a cluster of three real nodes for a test session."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from django.test import override_settings

from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.cluster.split import slot_of
from tests.support.engine.asking import KEYS
from tests.support.engine.tls import Certificate
from tests.support.eventually import until

NODES, SLOTS = 3, 16384


def _port() -> int:
    """Return a free port for a node. The cluster's bus needs the port that is 10,000 higher, so it must be free too.

    Both are below the ports that the system gives to outgoing connections, so no connection takes them meanwhile.
    """
    # Other processes of the same run have the same seed of `random`.
    while not all(map(_is_free, (port := 10_000 + secrets.randbelow(12_000), port + 10_000))):
        pass
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _follows(client: redis.Redis, node: str) -> bool:
    """Return whether the client's node knows `node` as a replica."""
    known = client.execute_command("CLUSTER NODES").values()
    return any(one["node_id"] == node and "slave" in one["flags"] for one in known)


def _migrate(source: redis.Redis, port: int, *keys: bytes) -> None:
    """Move keys to the node at a port, as soon as that node accepts them."""

    def moved() -> bool:
        try:
            source.migrate("127.0.0.1", port, keys, 0, 5000)
        except redis.ResponseError as error:
            if "CLUSTERDOWN" not in str(error):
                raise
            return False
        return True

    until(moved, "the keys could move")


class Cluster:
    """The nodes, each with a third of the slots. `node_timeout` (ms): a replica takes over after about this time.

    With a certificate, the nodes and the app speak TLS with each other. The clients of this class do not.
    """

    def __init__(
        self, directory: Path, binary: Path, node_timeout: int = 15_000, certificate: Certificate | None = None
    ) -> None:
        self._certificate = certificate
        #: For each port by which the nodes know each other: the port of the same node for the clients of this class.
        self._plain_ports: dict[int, int] = {}
        self._options = {
            "cluster-enabled": "yes",
            "appendfsync": "always",
            "cluster-require-full-coverage": "no",
            "cluster-node-timeout": str(node_timeout),
        }
        self.servers: list[EmbeddedServer] = []
        self.clients: list[redis.Redis] = []
        try:
            for number in range(NODES):
                self.servers.append(self._started(directory / str(number), binary))
                self.clients.append(redis.Redis(port=self.servers[-1].port))
            for number, client in enumerate(self.clients):
                client.cluster("SET-CONFIG-EPOCH", number + 1)
                client.cluster("ADDSLOTS", *range(SLOTS * number // NODES, SLOTS * (number + 1) // NODES))
                client.cluster("MEET", "127.0.0.1", self._ports[0])
            until(self._agrees, "the nodes know each other")
        except BaseException:
            self.stop()
            raise

    def _started(self, folder: Path, binary: Path) -> EmbeddedServer:
        """Start a node."""
        port = _port()
        if self._certificate is None:
            server = EmbeddedServer(folder, port=port, aof=True, binary=binary, options=self._options)
        else:
            tls = {**self._certificate.options(port), "tls-cluster": "yes"}
            server = EmbeddedServer(folder, aof=True, binary=binary, options={**self._options, **tls})
        self._plain_ports[port] = server.port
        return server

    @property
    def _ports(self) -> list[int]:
        """Return the ports by which the nodes know each other, in the order in which they were started."""
        return list(self._plain_ports)

    def _agrees(self) -> bool:
        seen = [client.execute_command("CLUSTER SLOTS") for client in self.clients]
        states = [client.cluster("INFO") for client in self.clients]
        return all(len(rows) == NODES for rows in seen) and all(state["cluster_state"] == "ok" for state in states)

    @property
    def url(self) -> str:
        return self.servers[0].url if self._certificate is None else f"rediss://127.0.0.1:{self._ports[0]}/0"

    def node_of(self, shard: int) -> int:
        """Return the node that has a shard at first."""
        slot = slot_of(KEYS, shard)
        return next(number for number in range(NODES) if slot < SLOTS * (number + 1) // NODES)

    def client_of(self, shard: int) -> redis.Redis:
        """Return a client of that node."""
        return self.clients[self.node_of(shard)]

    def settings(self, location: str = "", **options: Any) -> Any:
        """Return the app's cache alias for the cluster, by default with the URL of the first node."""
        factory = {"CONNECTION_FACTORY": "ratelimits.django_redis_cluster.ConnectionFactory"}
        backend = "django_redis.cache.RedisCache"
        if self._certificate is not None:
            options = {"CONNECTION_POOL_KWARGS": self._certificate.pool_kwargs, **options}
        alias = {"BACKEND": backend, "LOCATION": location or self.url, "OPTIONS": {**factory, **options}}
        return override_settings(CACHES={"ratelimits": alias, "default": alias})

    @contextmanager
    def replica(self, number: int, directory: Path, binary: Path) -> Iterator[redis.Redis]:
        """Add a replica of a node; in the end remove it."""
        server = self._started(directory / "replica", binary)
        try:
            with redis.Redis(port=server.port) as client:
                mine, its = (one.execute_command("CLUSTER MYID").decode() for one in (client, self.clients[number]))
                client.cluster("MEET", "127.0.0.1", self._ports[number])
                until(lambda: client.cluster("REPLICATE", its), "the replica knows whom to follow")
                until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is up")
                until(lambda: all(_follows(one, mine) for one in self.clients), "all know the replica as one")
                try:
                    yield client
                finally:
                    if client.info("replication")["role"] == "master":
                        self.fail_over(self.clients[number])
                    for one in self.clients:
                        one.cluster("FORGET", mine)
        finally:
            server.kill()

    @contextmanager
    def guest(self, shard: int, directory: Path, binary: Path) -> Iterator[redis.Redis]:
        """Add a node that has a shard's slot during the block. Afterwards it leaves the cluster, but still answers."""
        slot, source = slot_of(KEYS, shard), self.client_of(shard)
        options = {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}
        server = EmbeddedServer(directory / "guest", port=_port(), binary=binary, options=options)
        self.servers.append(server)  # so that it is stopped with the others
        client = redis.Redis(port=server.port)
        mine, its = (one.execute_command("CLUSTER MYID").decode() for one in (client, source))
        client.cluster("MEET", "127.0.0.1", self.servers[0].port)
        until(lambda: all(mine in str(one.execute_command("CLUSTER NODES")) for one in self.clients), "all met it")
        until(lambda: len(client.execute_command("CLUSTER SLOTS")) == NODES, "it knows who has which slots")
        self._hand_over(slot, its, source, mine, client)
        until(lambda: client.cluster("INFO")["cluster_state"] == "ok", "it takes part")
        try:
            yield client
        finally:
            self._hand_over(slot, mine, client, its, source)
            for one in self.clients:
                one.cluster("FORGET", mine)
            client.cluster("RESET", "HARD")
            client.close()

    @contextmanager
    def on_the_move(self, shard: int) -> Iterator[Callable[..., None]]:
        """Begin to move a shard's slot, and yield a function that moves its keys. Afterwards, undo everything."""
        slot, source = slot_of(KEYS, shard), self.client_of(shard)
        number = (self.node_of(shard) + 1) % NODES
        target = self.clients[number]
        giver, taker = (one.execute_command("CLUSTER MYID").decode() for one in (source, target))
        target.cluster("SETSLOT", slot, "IMPORTING", giver)
        source.cluster("SETSLOT", slot, "MIGRATING", taker)
        try:
            yield lambda *keys: _migrate(source, self.servers[number].port, *keys)
        finally:
            source.cluster("SETSLOT", slot, "STABLE")
            for key in target.cluster("GETKEYSINSLOT", slot, 100):
                _migrate(target, self.servers[self.node_of(shard)].port, key)
            target.cluster("SETSLOT", slot, "STABLE")

    @contextmanager
    def moved(self, shard: int) -> Iterator[None]:
        """Move a shard's slot with all its keys to another node during the block."""
        slot, own = slot_of(KEYS, shard), self.node_of(shard)
        other = (own + 1) % NODES
        self._move(slot, own, other)
        try:
            yield
        finally:
            self._move(slot, other, own)

    def _move(self, slot: int, giver: int, taker: int) -> None:
        source, target = self.clients[giver], self.clients[taker]
        mine, its = (one.execute_command("CLUSTER MYID").decode() for one in (source, target))
        target.cluster("SETSLOT", slot, "IMPORTING", mine)
        source.cluster("SETSLOT", slot, "MIGRATING", its)
        for key in source.cluster("GETKEYSINSLOT", slot, 1000):
            _migrate(source, self.servers[taker].port, key)
        for one in (target, *self.clients):
            one.cluster("SETSLOT", slot, "NODE", its)

    def _hand_over(self, slot: int, giver: str, source: redis.Redis, taker: str, target: redis.Redis) -> None:
        """Give an empty slot to another node, and tell all nodes."""
        target.cluster("SETSLOT", slot, "IMPORTING", giver)
        source.cluster("SETSLOT", slot, "MIGRATING", taker)
        # Do not tell a guest that gives its only slot back: it may already be a replica of the node that takes it.
        for one in (target, *self.clients):
            one.cluster("SETSLOT", slot, "NODE", taker)

    def fail_over(self, replica: redis.Redis) -> None:
        """Let a replica take over in agreement with its primary."""
        mine = replica.execute_command("CLUSTER MYID").decode()
        # A node that still knows it as a primary refuses its vote, and is asked again only after a minute.
        until(lambda: all(_follows(one, mine) for one in self.clients), "all know the replica as one")
        asked, port = 0.0, replica.info("replication")["master_port"]
        # Write something to replicate: Redis 6.2 assumes that a primary which has replicated nothing did not answer.
        with redis.Redis(port=self._plain_ports[port]) as primary:
            primary.script_load("")

        def took_over() -> bool:
            nonlocal asked
            # Ask again: a primary that does not know the replica yet ignores it.
            if time.monotonic() - asked > 1:
                replica.cluster("FAILOVER")
                asked = time.monotonic()
            return bool(replica.info("replication")["role"] == "master")

        until(took_over, "the replica takes over")
        until(lambda: replica.info("replication")["connected_slaves"] == 1, "the primary follows it")

    def calls(self) -> list[int]:
        """Return how many scripts each node has run."""
        infos = [client.info("commandstats") for client in self.clients]
        return [info.get("cmdstat_evalsha", {"calls": 0})["calls"] for info in infos]

    def empty(self) -> None:
        """Empty all nodes before a test."""
        for client in self.clients:
            client.flushall()

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.kill()


def wait_until_loaded(client: redis.Redis) -> None:
    """Wait until a node that was started again is part of the cluster."""
    deadline = time.monotonic() + 20
    while client.cluster("INFO")["cluster_state"] != "ok":
        assert time.monotonic() < deadline
        time.sleep(0.02)
