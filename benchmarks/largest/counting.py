"""The largest calls of the scripts that count usage which a process has kept: refusals, and prefetched permits.

Each call has the maximum number of counters, and no counter is in the open batch yet. Among the calls are some that
fill the batch, so that the same call also seals it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ratelimits.engine.call import Usage
    from ratelimits.engine.server import Server

#: Calls of each operation. Together they fill several batches.
CALLS = 60
#: The cost of each request. Requests with another cost than 1 have two counters in a batch.
COST = 7
#: The shard that counts everything.
SHARD = 0


def operations(server: Server) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each call, with the name of its operation."""
    from ratelimits.engine import counting

    counted = usages("counted")
    for _ in range(CALLS):
        yield (
            f"counting/count, {counting.MAX_COUNTERS} entries",
            refusals(server, islice(counted, counting.MAX_COUNTERS)),
        )
    for _ in range(CALLS):
        all_usages = list(islice(counted, counting.MAX_SPENT_COUNTERS))
        _record(server, all_usages)
        yield f"counting/spent, {counting.MAX_SPENT_COUNTERS} entries", _spent(server, all_usages)


def usages(name: str) -> Iterator[Usage]:
    """Yield usage of one meter, each of another account and key. `name` is a part of their names."""
    from ratelimits.engine.call import Meter, Usage

    for number in count():
        yield Usage(f"{name}-{number}", f"api_key:{name}-{number}", (Meter("tokens", 12, 3456),))


def refusals(server: Server, counted: Iterator[Usage]) -> Callable[[], object]:
    """Return a call that counts one refusal of each usage."""
    from ratelimits.engine.call import new_nonce
    from ratelimits.engine.counting import Count, RefusalCount

    counts = [RefusalCount(usage, (COST,), 12, 3456, 5) for usage in counted]
    keyspace = server.keyspace
    command = Count(keyspace.head(SHARD), keyspace.open(SHARD))
    for one in counts:
        command.add(one)
    return lambda: server.wire.call(command, new_nonce())


def _record(server: Server, usages: list[Usage]) -> None:
    """Record a prefetch for each usage."""
    from ratelimits.engine.call import counters_of

    moment = time.time_ns() // 1000
    records: dict[Any, bytes] = {
        usage.account: b"0 %d %d %b %d" % (100, moment, counters_of(usage, moment // 10**6)[0], COST)
        for usage in usages
    }
    server.wire.client_of(server.keyspace, SHARD).hset(server.keyspace.prefetched(SHARD), mapping=records)


def _spent(server: Server, usages: list[Usage]) -> Callable[[], object]:
    from ratelimits.engine.call import new_nonce
    from ratelimits.engine.counting import CountSpent, Spent

    counting = [Spent(usage.account, 50, is_all=False) for usage in usages]
    command = CountSpent(server.keyspace, SHARD, counting)
    return lambda: server.wire.call(command, new_nonce())
