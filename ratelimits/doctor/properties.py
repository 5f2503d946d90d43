"""What a server says of itself in INFO, and what of it does not suit the app. `check` and the status page use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ratelimits.conf import conf
from ratelimits.doctor.findings import Part, ServerFinding, installed, more_memory
from ratelimits.engine import memory

#: The oldest supported version of Redis. Valkey names the version of Redis that it is compatible with: 7.2.4.
OLDEST = (6, 2)
#: The parts whose states have a time to live.
_DECIDING = frozenset({Part.LIMITS, Part.LOGS, Part.LEASES})


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a server that the app depends on. None means that the server does not say it."""

    #: "Redis" or "Valkey"; "" if the server does not tell its version.
    product: str
    version: str
    #: The version of Redis with which the server is compatible.
    compatible: tuple[int, ...]
    #: How much memory it uses, if it names a maximum.
    use: memory.Use | None
    #: Used memory in bytes.
    memory: int | None
    #: Maximum memory in bytes; 0 for no maximum.
    max_memory: int
    #: The eviction policy.
    policy: str | None
    #: Whether the server has an append-only file.
    aof: bool | None
    #: Whether the last write to the append-only file succeeded.
    aof_written: bool
    is_replica: bool
    #: Whether the server is a node of a cluster.
    is_node: bool

    @property
    def may_evict(self) -> bool:
        """Return whether the server says that it deletes keys when its memory is full."""
        return self.policy not in (None, "noeviction")

    @property
    def may_use_reserve(self) -> bool:
        """Return whether the app may use the reserve of this server when its memory is full."""
        return self.use is not None and self.use.level < memory.Shortage.BEYOND


def properties(info: Mapping[str, Any]) -> Properties:
    """Return the properties in the reply to INFO, as redis-py reads it."""
    redis_version = str(info.get("redis_version", ""))
    valkey_version = info.get("valkey_version")
    aof = info.get("aof_enabled")
    return Properties(
        product="Valkey" if valkey_version else "Redis" if redis_version else "",
        version=str(valkey_version or redis_version),
        compatible=tuple(int(part) for part in redis_version.split(".")[:2] if part.isdigit()),
        use=memory.use_of(info),
        memory=int(info["used_memory"]) if "used_memory" in info else None,
        max_memory=int(info.get("maxmemory", 0)),
        policy=str(info["maxmemory_policy"]) if info.get("maxmemory_policy") else None,
        aof=None if aof is None else bool(aof),
        aof_written=info.get("aof_last_write_status", "ok") == "ok",
        is_replica=info.get("role") == "slave",
        is_node=bool(info.get("cluster_enabled")),
    )


def unsuitable(found: Properties, *, in_cluster: bool = False) -> Iterator[ServerFinding]:
    """Yield a finding for each property that does not suit the app. `in_cluster`: the project uses a Redis Cluster."""
    if found.compatible and found.compatible < OLDEST:
        yield ServerFinding(
            "old",
            frozenset(installed()),
            f"The server has version {found.version}. The app needs Redis 6.2 or newer, or Valkey.",
            "Upgrade the server.",
        )
    if found.is_replica:
        yield ServerFinding(
            "replica",
            frozenset(installed()),  # each part writes
            "The server is a read-only replica: it refuses writes.",
            "Name the primary in the LOCATION of the cache, or use Sentinel (docs/scaling.md).",
        )
    if found.is_node and not in_cluster:
        yield ServerFinding(
            "cluster",
            frozenset(installed()),
            "The server is a node of a Redis Cluster, but the cache does not connect to the whole cluster.",
            "Connect the cache as docs/scaling.md#redis-cluster says.",
        )
    yield from append_only(found)
    yield from eviction(found)
    yield from short_memory(found)


def short_memory(found: Properties) -> Iterator[ServerFinding]:
    """Yield a finding if the server is full, or soon is, or does not say it.

    Only the walks show which parts do not work any more.
    """
    if found.memory is None:
        yield ServerFinding(
            "memory-unknown",
            frozenset(),
            "The server does not say how much memory it uses, so MEMORY_BUDGET does nothing: clients that invent"
            " addresses can fill it, and then the failure policies answer (docs/scaling.md).",
            "Let the app's user send INFO, or watch the server's memory in another way.",
        )
    if found.use is None or found.use.level < memory.Shortage.NEAR:
        return
    uses = f"The server uses {found.use.share:.0%} of its maximum memory"
    if found.use.level is memory.Shortage.NEAR:
        yield ServerFinding(
            "nearly-full", frozenset(), f"{uses}: new addresses of a network share one count.", more_memory()
        )
        return
    counts = Part.COUNTS in installed()
    if found.may_use_reserve:
        then = (
            f"A full server still decides{' and counts' if counts else ''}, in a reserve above its maximum memory, but"
            " new addresses share counts (docs/scaling.md)."
        )
    else:
        then = "The reserve is used too, so it refuses to decide: the failure policies answer (docs/scaling.md)."
        if counts:
            then += " But usage that waits can still be sealed and drained, which gives memory back."
    yield ServerFinding("full", frozenset(), f"{uses}. {then}", more_memory())


def append_only(found: Properties) -> Iterator[ServerFinding]:
    """Yield what is wrong with the append-only file. Only some values of RATELIMITS["FENCE"] need this file."""
    if Part.BILLS not in installed() or conf.FENCE not in ("aof", "waitaof"):
        return
    # A server that does not tell it may have the file: the walk of the part tries the fence.
    if found.aof is False:
        yield ServerFinding(
            "append-only",
            frozenset({Part.BILLS, Part.RESTORES}),
            "The Redis server keeps no append-only file. So limits work, but no usage will be written to the ledger.",
            "Start the server with `redis-server --appendonly yes`, or set `appendonly yes` in its configuration."
            " Some other values of RATELIMITS['FENCE'] need no such file (docs/billing/pipeline.md).",
        )
    if not found.aof_written:
        yield ServerFinding(
            "not-written",
            frozenset({Part.BILLS, Part.RESTORES}),
            "The server could not write its append-only file. Until it can, no usage reaches the ledger.",
            "Look at the server's log and at its disk.",
        )


def eviction(found: Properties) -> Iterator[ServerFinding]:
    """Yield a finding if the server can delete keys of the app, or does not tell whether it can."""
    limits, counting = "limits, so that requests pass that should not", {Part.COUNTS, Part.BILLS, Part.RESTORES}
    counting &= {*installed()}
    lost = f"usage that is not in the ledger yet, and {limits}" if counting else limits
    if found.policy is None:
        yield ServerFinding(
            "policy-unknown",
            frozenset(),
            f"The Redis server's maxmemory-policy cannot be read. If it evicts, the server can drop {lost}.",
            "Ask its provider or its administrator for `maxmemory-policy noeviction`.",
        )
    elif found.may_evict:
        # The keys of usage have no time to live, so a policy such as volatile-lru keeps them.
        takes_usage = bool(counting) and not found.policy.startswith("volatile-")
        yield ServerFinding(
            "evicts",
            _DECIDING | counting if takes_usage else _DECIDING,
            f"The Redis server's maxmemory-policy is {found.policy}: when its memory is full, it can drop"
            f" {lost if takes_usage else limits}.",
            "Set `maxmemory-policy noeviction`. If other data needs another policy, use a separate server.",
        )
