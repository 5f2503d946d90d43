"""The largest call of each script that the app sends: as many entries as tests/engine/test_script_bounds.py allows.

The scripts that count usage which a process has kept are in `counting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from benchmarks.largest import counting

if TYPE_CHECKING:
    from ratelimits.engine.call import Call
    from ratelimits.engine.server import Server

#: Calls of each operation.
CALLS = 30
#: The shard of the calls that a worker makes.
SHARD = 0
#: The number of counts that wait in a process after an outage (quota/deny_cache.py keeps at most this many).
WAITING = 50_000
#: The rules of the largest decision take turns. All have room, so each limit is charged.
RULES: tuple[dict[str, Any], ...] = (
    {"algorithm": "token_bucket", "rate": 1000, "period": 1},
    {"algorithm": "gcra", "rate": 1000, "period": 1},
    {"algorithm": "leaky_bucket", "rate": 1000, "period": 1},
    {"algorithm": "fixed_window", "period": 60},
    {"algorithm": "calendar_window", "calendar_unit": "month"},
    {"algorithm": "sliding_window", "period": 60, "sub_windows": 10},
    {"algorithm": "sliding_log", "period": 60},
    {"algorithm": "concurrency", "lease_ttl": 60},
)
#: The algorithm that takes longest at the maximum number of limits.
LEASES = RULES[-1:]


def operations(server: Server) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each call, with the name of its script and of its entries."""
    from ratelimits.engine.decide import decide_call

    yield from counting.operations(server)
    yield from _waiting(server)
    for what, rules in (("entries", RULES), ("entries, all limits concurrency", LEASES)):
        call, entries = _largest_decision(rules)
        for _ in range(CALLS):
            yield f"decide, {entries} {what}", partial(decide_call, server, call)
    yield from _of_a_worker(server)


def _largest_decision(rules: Sequence[dict[str, Any]]) -> tuple[Call, int]:
    """Return a call with the maximum number of limits and of meters, and how many both are. The rules take turns."""
    from ratelimits.engine import algorithm_from_json
    from ratelimits.engine.call import Call, Meter, Usage
    from ratelimits.engine.program import MAX_LIMITS, Term, program
    from ratelimits.quota.costs import MAX_METERS

    keys = ("user:1", "api_key:1", "account:1", "ip:192.0.2.1", "global")
    algorithms = [algorithm_from_json({"capacity": 1_000_000, **rule}) for rule in rules]
    terms = tuple(
        Term(algorithms[number % len(rules)], f"limit-{number}", number % len(keys), number % MAX_METERS)
        for number in range(MAX_LIMITS)
    )
    meters = tuple(Meter(f"meter-{number}", number, 1) for number in range(MAX_METERS))
    usage = Usage("1", "api_key:1", meters)
    costs = (counting.COST,) * MAX_METERS
    call = Call(program(terms), keys, costs, account="1", usage=usage, version=None)
    return call, MAX_LIMITS + MAX_METERS


def _waiting(server: Server) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls with which a process sends all counts that wait after an outage. The longest one counts."""
    from ratelimits.engine.counting import RefusalCount
    from ratelimits.quota.deny_cache import send

    usages = counting.usages("refused")
    counts = [RefusalCount(next(usages), (counting.COST,), 12, 3456, 5) for _ in range(WAITING)]
    yield f"counting/count, {WAITING} waiting counts", lambda: send(server, counts)


def _of_a_worker(server: Server) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the calls of a worker: seal a full batch, list as many batches as one call lists, and drop one."""
    from ratelimits.engine.assemble import scripts
    from ratelimits.usage.ledger.pending import BATCHES_PER_PASS, read_pending

    client = server.wire.client_of(server.keyspace, SHARD)
    meta, script = server.keyspace.meta(SHARD), scripts.read("memory/full", "run", "batch", "seal").text.decode()
    usages = counting.usages("sealed")
    for number in range(max(CALLS, BATCHES_PER_PASS)):
        # Two counters for each request, so 990 counters: with 1,000 the batch would be sealed already.
        for _ in range(11):
            counting.refusals(server, islice(usages, 45))()
        yield "seal, 990 entries", partial(client.eval, script, 1, meta, f"nonce-{number}", "", "")
    for _ in range(CALLS):
        yield f"pending, {BATCHES_PER_PASS} entries", lambda: read_pending(server, [SHARD], {})
    publish, head = scripts.read("memory/full", "publish").text.decode(), server.keyspace.head(SHARD)
    for version in range(1, 1 + CALLS):
        yield "publish, 1 entry", partial(client.eval, publish, 1, head, str(version))
    drop = scripts.read("drop").text.decode()
    for name in client.lrange(server.keyspace.sealed(SHARD), 0, CALLS - 1):
        yield "drop, 1 entry", partial(client.eval, drop, 1, meta, name)
