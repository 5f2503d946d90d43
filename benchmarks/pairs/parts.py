"""Measure the server's time for each part of a decision's script, with copies of the script that end after a part.

    python -m benchmarks.pairs.parts [--rounds 100] [--server valkey] [--out DIR]

A script is cut at the numbered comments of lua/decide.lua: a cut script does everything before the comment, and then
returns. All cut scripts take turns. Their times are those that the server reports for EVALSHA (INFO commandstats). The
smallest time of all rounds is used, because other processes can only make a call slower. The time of a part is the time
of the script that is cut after this part, minus the time of the script that is cut before this part.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hiredis
import redis

from benchmarks.support import report, servers

if TYPE_CHECKING:
    from ratelimits.engine.command import Command

#: Each part, and the text of lua/decide.lua with which the part begins. Comment 3 is missing here, because its code is
#: only for receipts.
PARTS = {
    "read the arguments, the clock and the strings of the states": "local call,",
    "compare the version of the rules": "\n-- 1. ",
    "unpack the states": "\n-- 2. ",
    "decide": "\n-- 4. ",
    "charge, and write the states": "\n-- 5. ",
    "count the request as usage": "\n-- 6. ",
    "make the reply": "\n-- 7. ",
}
#: The first and the last row of the table.
BEGIN, WHOLE = "start an empty script that gets the keys and arguments of a decision", "the whole script"


class Case(NamedTuple):
    """The requests of a column of the table.

    algorithm  the algorithm of the only rule; "" for three rules
    admits     whether the requests are admitted
    first_use  whether each request is the first request of its key. Such requests are not counted as usage, because
               each of them would also create a counter
    """

    algorithm: str
    admits: bool = True
    first_use: bool = False


CASES = {
    "token bucket": Case("token_bucket"),
    "fixed window": Case("fixed_window"),
    "fixed window, refused": Case("fixed_window", admits=False),
    "sliding log": Case("sliding_log"),
    "concurrency": Case("concurrency"),
    "concurrency, first use of a key": Case("concurrency", first_use=True),
    "3 rules on one key": Case(""),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.parts", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="rounds that every cut script takes part in")
    parser.add_argument("--calls", type=int, default=192, help="calls of each cut script in each round")
    parser.add_argument("--server", type=servers.binary, help=servers.SERVER_HELP)
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    available = servers.cores()
    with servers.redis_server(available[0], options.server) as server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(server, database), tables=False)
        servers.pin(available[-1])
        machine_info = report.machine(server.url)
        results = measure(server.url, options.rounds, options.calls)
    machine_info = {**machine_info, "load_after": report.load()}
    run = report.run_json("pairs.parts", machine_info, vars(options), [], results=results)
    print(report.table(COLUMNS, rows_of(run)))
    report.write(run, options.out)
    return 0


def _commands(case: Case) -> Callable[[str], Command]:
    """Return a function that takes a user's id and makes the command for this user."""
    from benchmarks.measured.algorithms import CASES as NUMBERS
    from benchmarks.measured.ours import call_of, three_limits
    from ratelimits.algorithms.limits import algorithm_from_json
    from ratelimits.engine.command import Command
    from ratelimits.engine.keys import Keyspace

    keyspace, now, limits = Keyspace("parts", 64), time.time_ns() // 1000, three_limits()
    if case.algorithm:
        wide, tight = NUMBERS[case.algorithm]
        numbers = {"algorithm": case.algorithm, "capacity": 1_000_000, **(wide if case.admits else tight)}
        limits = [("limit", algorithm_from_json(numbers))]
    return lambda user: Command(keyspace, call_of(limits, now, counted=not case.first_use, user=user))


def cuts(script: str) -> dict[str, str]:
    """Return, for each part, the script that ends after this part: first an empty script, finally the whole script."""
    parts = [part for part, comment in PARTS.items() if comment in script]
    out = {BEGIN: "return 1"}
    for part, following in pairwise(parts):
        comment = PARTS[following]
        out[part] = script.replace(comment, f"\ndo return 1 end{comment}", 1)
    return {**out, parts[-1]: script}


class _Server:
    """A client of the server, and the run of the server."""

    def __init__(self, client: redis.Redis) -> None:
        from benchmarks.support.pipelines import run_of

        self.client, self._run = client, run_of(client)

    def load(self, script: str) -> bytes:
        """Load a script, and return its SHA-1."""
        loaded: Any = self.client.script_load(script)
        return loaded if isinstance(loaded, bytes) else str(loaded).encode()

    def micros(self, commands: Sequence[Command], sha: bytes) -> float:
        """Send commands that call this script, and return the time of one call in µs."""
        from ratelimits.engine.call import new_nonce

        connection = self.client.connection_pool.get_connection()
        self.client.config_resetstat()
        for start in range(0, len(commands), 100):
            portion = commands[start : start + 100]
            packed = [one.to_bytes(self._run, new_nonce()).replace(one.script.sha, sha) for one in portion]
            connection.send_packed_command([b"".join(packed)])
            for _command in portion:
                reply = connection.read_response()
                assert not isinstance(reply, hiredis.ReplyError), reply
        self.client.connection_pool.release(connection)
        return float(self.client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def measure(url: str, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the time of each part in µs, by case."""
    users = iter(range(1_000_000, 100_000_000))
    times: dict[str, dict[str, float]] = {}
    order = random.Random(1)
    with redis.Redis.from_url(url) as client:
        server, made = _Server(client), {}
        for name, case in CASES.items():
            make = _commands(case)
            repeated = make(f"{next(users)}")
            shas = {part: server.load(cut) for part, cut in cuts(repeated.script.text.decode()).items()}
            made[name] = make, repeated, shas
            times[name] = dict.fromkeys(shas, float("inf"))
        for _round in range(rounds):
            for name, case in CASES.items():
                make, repeated, shas = made[name]
                # Not timed: this uses up the permits of a limit that refuses.
                server.micros([repeated] * 2, repeated.script.sha)
                for part in order.sample(list(shas), len(shas)):
                    commands = [make(f"{next(users)}") for _ in range(calls)] if case.first_use else [repeated] * calls
                    times[name][part] = min(times[name][part], server.micros(commands, shas[part]))
    return {name: _parts(times_of_cuts) for name, times_of_cuts in times.items()}


def _parts(times: dict[str, float]) -> dict[str, float]:
    """Return the time of each part in µs, from the times of the cut scripts."""
    before = [0.0, *times.values()]
    parts = {part: round(micros - earlier, 3) for (part, micros), earlier in zip(times.items(), before, strict=False)}
    return {**parts, WHOLE: [*times.values()][-1]}


def rows_of(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a row for each part, with the time of each case."""
    cases, parts = run["results"].values(), [BEGIN, *PARTS, WHOLE]
    return [(part, *(case.get(part) for case in cases)) for part in parts]


COLUMNS = ("part of the script, µs", *CASES)


if __name__ == "__main__":
    sys.exit(main())
