"""Find out whether new connections to the one address of a server come to a replica, or to different servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import redis
from redis.exceptions import RedisError, ResponseError

from ratelimits.doctor.findings import ServerFinding
from ratelimits.doctor.parts import Part
from ratelimits.doctor.scratch import TIME_TO_LIVE, Scratch
from ratelimits.engine.transport.connection import refuses_writes
from ratelimits.engine.transport.run import read_run

#: How many new connections are asked for their server: a balancer often gives them to its servers in turn.
CONNECTIONS = 8
#: Marks a server. Returns 1 if an earlier connection has marked it. (A full server refuses SET as the first write.)
_MARK = """
redis.pcall('PERSIST', KEYS[1])
local marked = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return marked
"""


def behind_address(scratch: Scratch) -> Iterator[ServerFinding]:
    """Yield a finding if the address leads to a replica or to several servers.

    Each connection writes a mark that the next ones find on the same server: it needs no INFO, and no proxy can hide
    it. Do not ask this of a cluster: each node has an address of its own, and the app asks which nodes are primaries.
    """
    pool, replicas, runs, unmarked = scratch.client.connection_pool, 0, set(), 0
    key, clients = scratch.key("address"), list[redis.Redis]()
    with ExitStack() as stack:
        for _number in range(CONNECTIONS):  # all stay open, so each is another connection
            client = stack.enter_context(redis.Redis(connection_pool=pool, single_connection_client=True))
            stack.callback(pool.disconnect, inuse_connections=False)
            clients.append(client)
            runs.add(read_run(client, key))
            try:
                unmarked += client.eval(_MARK, 1, key, TIME_TO_LIVE) == 0
            except ResponseError as error:
                replicas += refuses_writes(error)
        for client in clients:
            with suppress(RedisError, OSError):
                client.unlink(key)
    # A user who may not write has no marks. Then the runs differ.
    servers = max(len(runs), unmarked)
    if replicas:
        share = "is a read-only replica" if replicas == CONNECTIONS else "leads also to a read-only replica"
        yield ServerFinding(
            "replica",
            frozenset(Part),
            f"The server's address {share}: {replicas} of {CONNECTIONS} connections could not write. Requests on such a"
            " connection are not decided: the failure policies answer.",
            "Name the address of the primary in CACHES, or use Sentinel. Replicas cannot decide limits.",
        )
    elif servers > 1:
        yield ServerFinding(
            "several",
            frozenset(Part),
            f"The server's address leads to {servers} different servers: each of them counts its own limits.",
            "Name the address of one server in CACHES, or a Redis Cluster.",
        )
