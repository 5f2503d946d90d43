"""Compare the app's own implementations with plain ones, to see whether the own ones are worth keeping.

    python -m benchmarks.twice [--out DIR]

Both implementations are timed in the same rounds, on one core. Remove an own implementation that is not clearly faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import redis

from benchmarks.support import report, servers
from benchmarks.support.timing import Case, Timed, interleaved

#: Name of a pair -> description of the app's own implementation, and of the plain one.
PAIRS = {
    "reader": ("one reply, read from the socket", "redis-py's connection and parser"),
    "batch": ("a simulated decision's command, built from stored parts", "a whole command each time"),
    "steps": ("a decision's steps, called one after the other", "a generator of the steps and its driver"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.twice", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds that every way takes part in")
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each way in each round")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    core = servers.cores()[0]
    with servers.redis_server(core) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database), tables=False)
        servers.pin(core)
        machine_info = report.machine(redis_server.url)
        timed = interleaved(_cases(redis_server.url), options.rounds, options.calls)
    results = {name: _pair(timed[f"{name} own"], timed[f"{name} plain"]) for name in PAIRS}
    machine_info = {**machine_info, "load_after": report.load()}
    run = report.run_json("twice", machine_info, vars(options), [], results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _pair(own: Timed, plain: Timed) -> dict[str, float]:
    ways = own.to_json()["median_us"], plain.to_json()["median_us"]
    return {"own_us": ways[0], "plain_us": ways[1], "times": round(plain.ratio(own), 2)}


def _cases(url: str) -> list[Case]:
    from ratelimits.engine.assemble.scripts import resp
    from ratelimits.engine.transport.connection import OwnedConnection, exchange

    ping, process = resp(b"PING"), object()
    pool = redis.ConnectionPool.from_url(url)
    own = OwnedConnection(pool.connection_class, pool.connection_kwargs, process)
    own.greet()
    plain = pool.get_connection()
    made = _making()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("reader own", lambda: own.exchange(ping)),
        ("reader plain", lambda: exchange(plain, ping)),
        *made.items(),
        ("steps own", lambda: _ended(_step(_step(_step(0))))),
        ("steps plain", lambda: _ended(_driven(_steps()))),
    ]
    return [Case(name, name, "ours", call) for name, call in calls]


def _making() -> dict[str, Callable[[], object]]:
    """Return two functions that make the command of one simulated decision: the own way and the plain way."""
    from benchmarks.measured import ours
    from ratelimits.engine.call import Call, Op
    from ratelimits.engine.command import Command
    from ratelimits.engine.keys import Keyspace
    from ratelimits.engine.program import Term, program
    from ratelimits.simulate.replay import CommandMaker

    keyspace = Keyspace("twice", 1)
    terms = program(tuple(Term(algorithm, name, 0, 0) for name, algorithm in ours.three_limits()))
    maker, start = CommandMaker(keyspace, terms), time.time_ns() // 1000
    moments = iter(range(start, start + 10**9))
    call = Call(terms, ("42",), (1,), virtual=True)

    def whole() -> bytes:
        return Command(keyspace, call._replace(now=next(moments))).to_bytes("virtual", b"0")

    return {"batch own": lambda: maker.command(Op.TRY, "42", 1, next(moments)), "batch plain": whole}


# The functions below stand for a decision, whose three steps may wait: reading the rules, the server's reply, and the
# work after the reply. In the own way the steps are called one after the other. In the plain way a generator yields
# them.


def _step(number: int) -> int:
    return number + 1


def _steps() -> Generator[int, int, int]:
    number = 0
    for _each in range(3):
        number = yield number
    return number


def _driven(steps: Generator[int, int, int]) -> int:
    try:
        number = next(steps)
        while True:
            number = steps.send(_step(number))
    except StopIteration as ended:
        result: int = ended.value
        return result


def _ended(number: int) -> bool:
    return number == 3


def text_of(run: dict[str, Any]) -> str:
    """Return the run as a table."""
    rows = [(*PAIRS[name], one["own_us"], one["plain_us"], one["times"]) for name, one in run["results"].items()]
    return report.table(("own way", "plain way", "own, µs", "plain, µs", "plain / own"), rows)


if __name__ == "__main__":
    sys.exit(main())
