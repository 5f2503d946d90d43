"""Read the state of Redis for the status page. All servers together get TIMEOUT seconds to answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import redis

from ratelimits.conf import conf
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.server import current_server


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of one server.

    `memory` and `max_memory` are bytes (0 for no maximum). `aof` says whether the server keeps an append-only file,
    `aof_written` whether it could write it. `version` is the highest configuration version of its shards; `open` and
    `sealed` are numbers of batches.
    """

    memory: int
    max_memory: int
    policy: str
    aof: bool
    aof_written: bool
    version: int
    open: int
    sealed: int


@dataclass(frozen=True, slots=True)
class RedisState:
    """The servers that answered, the number of servers that did not, the first error, and the seconds that it took."""

    servers: tuple[ServerState, ...]
    silent: int
    error: str
    seconds: float

    @property
    def answers(self) -> bool:
        """Return whether all servers answered."""
        return not self.silent


#: The report of a thread: the number of servers that are asked, a server's state, or an error.
_Report = int | ServerState | Exception


def read_redis() -> RedisState:
    """Return the state of all servers that answer within TIMEOUT.

    The servers are asked in threads. A socket's timeout is not enough: it limits each single wait, and connecting, each
    part of a reply and each node of a cluster are separate waits. A thread that is still waiting ends by itself.
    """
    start, reports = time.monotonic(), SimpleQueue[_Report]()
    _start(_ask_all, reports)
    servers: list[ServerState] = []
    expected, failed, error = 1, 0, ""
    while len(servers) + failed < expected:
        left = start + conf.TIMEOUT - time.monotonic()
        try:
            report = reports.get(timeout=max(left, 0.0))
        except Empty:
            error = error or f"no answer within {conf.TIMEOUT:g} s"
            break
        if isinstance(report, int):
            expected = report
        elif isinstance(report, ServerState):
            servers.append(report)
        else:
            failed, error = failed + 1, error or f"{type(report).__name__}: {report}"
    return RedisState(tuple(servers), expected - len(servers), error, time.monotonic() - start)


def _start(target: Any, *arguments: Any) -> None:
    Thread(target=target, args=arguments, daemon=True, name="ratelimits-status").start()


def _ask_all(reports: SimpleQueue[_Report]) -> None:
    """Find the servers, and ask each of them in a separate thread. In a cluster, finding them needs an answer too."""
    try:
        server = current_server()
        found = list(server.wire.servers(server.keyspace, range(server.keyspace.shards)))
    except Exception as error:  # noqa: BLE001  (the page shows any error)
        reports.put(error)
        return
    reports.put(len(found))
    for client, shards in found[1:]:
        _start(_ask, client, server.keyspace, shards, reports)
    client, shards = found[0]
    _ask(client, server.keyspace, shards, reports)


def _ask(client: redis.Redis, keyspace: Keyspace, shards: Sequence[int], reports: SimpleQueue[_Report]) -> None:
    try:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.info()
            for shard in shards:
                pipeline.get(keyspace.head(shard))
                pipeline.exists(keyspace.open(shard))
                pipeline.llen(keyspace.sealed(shard))
            info, *replies = pipeline.execute()
        reports.put(_state(info, replies))
    except Exception as error:  # noqa: BLE001  (the page shows any error)
        reports.put(error)


def _state(info: dict[str, Any], replies: list[Any]) -> ServerState:
    heads = replies[::3]
    return ServerState(
        memory=int(info.get("used_memory", 0)),
        max_memory=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        aof=bool(info.get("aof_enabled")),
        aof_written=info.get("aof_last_write_status", "ok") == "ok",
        version=max((int(head.split()[0]) for head in heads if head), default=0),
        open=sum(replies[1::3]),
        sealed=sum(replies[2::3]),
    )
