"""Compare each algorithm with its equivalent in other packages: admitted and refused, on the server and in total.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.pairs.packages [--rounds 20] [--out DIR]

"On the server" is the time that the server reports for all commands that a client sends for one decision (INFO
commandstats). The smallest time of all rounds is used, because other processes can only make a call slower. "In total"
is the time of the call, with the work of client and server, which share one core. All cases take turns, and a ratio of
total times is the median of the ratios of the rounds.

This app also compares the version of the rules and counts the request as usage, in the same command. The other packages
do neither. So the table also has the time of this app without counting, and the time to compare the version. The bare
script (measured/bare.lua) decides one rule with as little work as possible, and counts nothing. So its ratios are about
the smallest possible.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import redis

from benchmarks.support import report, servers
from benchmarks.support.timing import Case, run_block

if TYPE_CHECKING:
    from benchmarks.measured.equivalents import Equivalent

#: The largest ratios (our time divided by the time of the other package) that this app aims at.
ON_SERVER, IN_TOTAL = 1.0, 0.7
#: Number of decisions whose commands are listed by MONITOR.
_MONITORED = 20
_KINDS = ("admitted", "refused")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.packages", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="rounds that every case takes part in")
    parser.add_argument("--calls", type=int, default=100, help="timed calls of each case in each round")
    parser.add_argument("--server", type=servers.binary, help=servers.SERVER_HELP)
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    core = servers.cores()[0]
    with servers.redis_server(core, options.server) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database), tables=False)
        servers.pin(core)
        run = measure(options, redis_server.url)
    print(text_of(run))
    report.write(run, options.out)
    return 0


class Figures(NamedTuple):
    """The times of one case in each round, in µs: on the server, and in total."""

    server: list[float]
    whole: list[float]


def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.measured import floors, peers
    from benchmarks.measured.equivalents import equivalents

    machine_info = report.machine(url, peers.PACKAGES)
    found = equivalents(url.rpartition("/")[0])
    cases = [*ours(sorted({one.algorithm for one in found})), *(case for one in found for case in _cases(one))]
    # Add the bare script for one rule, with and without a head: with a head, it compares the version of the rules.
    floors.load(url)
    raw = floors.RawSocket(url)
    for name, heads in (("versioned", 1), ("unversioned", 0)):
        packed = floors.bare(heads, states=1, each=1, counted=False, suffix=name)
        cases.append(Case(name, name, "floor", partial(floors.answers_list, raw, packed)))
    with redis.Redis.from_url(url) as client:
        figures = timed(client, cases, options.rounds, options.calls)
    version = min(figures["versioned"].server) - min(figures["unversioned"].server)
    results = [_row(one, kind, figures) for one in found for kind in _KINDS]
    claims, targets = _claims(results)
    machine_info = {**machine_info, "load_after": report.load()}
    return report.run_json(
        "pairs.packages", machine_info, vars(options), claims, targets,
        missing=peers.missing(), version_us=round(version, 3), results=results,
    )  # fmt: skip


def ours(algorithms: Sequence[str]) -> list[Case]:
    """Return this app's cases: for each algorithm admitted and refused, with and without counting."""
    from benchmarks.measured.algorithms import CASES
    from benchmarks.measured.ours import call_of, engine_server
    from ratelimits.algorithms.limits import algorithm_from_json
    from ratelimits.engine.command import Command
    from ratelimits.engine.decide import decide_call

    server, now = engine_server(), time.time_ns() // 1000

    def asks(algorithm: str, kind: str, counted: bool) -> Callable[[], object]:
        wide, tight = CASES[algorithm]
        numbers = tight if kind == "refused" else wide
        limit = algorithm_from_json({"algorithm": algorithm, "capacity": 1_000_000, **numbers})
        user = f"beside-{algorithm}-{kind}-{counted}"
        call = call_of([("limit", limit)], now, counted=counted, user=user)
        command = Command(server.keyspace, call)
        if kind == "admitted":
            return lambda: decide_call(server, call, command).allowed
        decide_call(server, call, command)  # uses up the only permit
        return lambda: not decide_call(server, call, command).allowed

    def case(algorithm: str, kind: str, counted: bool) -> Case:
        name = _name(algorithm, kind, counted)
        return Case(name, name, "ours", asks(algorithm, kind, counted))

    return [case(algorithm, kind, counted) for algorithm in algorithms for kind in _KINDS for counted in (True, False)]


def _name(algorithm: str, kind: str, counted: bool) -> str:
    return f"{algorithm}, {kind}{', counted' if counted else ''}"


def _cases(equivalent: Equivalent) -> list[Case]:
    """Return the two cases of another package's algorithm: admitted and refused."""
    # Use up the permits of the limit that refuses, so that it refuses in every timed call.
    for _ in range(20):
        equivalent.refuses()
    return [
        Case(
            f"{equivalent.title}, admitted",
            equivalent.title,
            "peer",
            equivalent.admits,
            equivalent.peer,
            equivalent.before,
        ),
        Case(f"{equivalent.title}, refused", equivalent.title, "peer", equivalent.refuses, equivalent.peer),
    ]


class Commands(NamedTuple):
    """How often each command was sent by clients for some decisions, and how often scripts called it."""

    sent: Counter[str]
    called: Counter[str]

    def micros(self, stats: Any, calls: int) -> float:
        """Return the server's time for one decision in µs.

        `stats` are the statistics of INFO commandstats after `calls` decisions.
        """
        total = 0.0
        for name, count in self.sent.items():
            # The statistics may lack a command: a thread of a package sends it only from time to time. If scripts call
            # the command too, its total time contains the calls by scripts. Then use the mean time of one call.
            one = stats.get(f"cmdstat_{name}", {"usec": 0, "usec_per_call": 0})
            total += one["usec_per_call"] * count / _MONITORED if name in self.called else one["usec"] / calls
        return max(total, 1 / calls)  # the server counts whole microseconds


def commands_of(client: redis.Redis, case: Case) -> Commands:
    """Return the commands of some decisions, as MONITOR lists them.

    Commands that scripts call are listed apart, because the server's time of a script contains the time of its
    commands.
    """
    run_block(case, 1)
    with client.client() as this_client, client.monitor() as monitor:
        for _ in range(_MONITORED):
            case.call()
        this_client.echo("the end")
        found = Commands(Counter(), Counter())
        while "the end" not in (one := monitor.next_command())["command"]:
            counter = found.called if one["client_type"] == "lua" else found.sent
            counter[one["command"].partition(" ")[0].lower()] += 1
    if "multi" in found.sent:
        raise AssertionError(f"{case.title}: the times of transactions are not measured")
    return found


def timed(client: redis.Redis, cases: Sequence[Case], rounds: int, calls: int) -> dict[str, Figures]:
    """Return the times of all cases by name. The cases take turns."""
    commands = {case.name: commands_of(client, case) for case in cases}
    figures = {case.name: Figures([], []) for case in cases}
    order = random.Random(1)
    for _round in range(rounds):
        gc.collect()
        for case in order.sample(list(cases), len(cases)):
            run_block(case, 1, 5)
            client.config_resetstat()
            clock, times = time.perf_counter_ns, []
            for _ in range(calls):
                start = clock()
                case.call()
                times.append(clock() - start)
            stats: Any = client.info("commandstats")
            figures[case.name].server.append(commands[case.name].micros(stats, calls))
            figures[case.name].whole.append(median(times) / 1000)
    return figures


def _row(equivalent: Equivalent, kind: str, figures: dict[str, Figures]) -> dict[str, Any]:
    counted, uncounted = (figures[_name(equivalent.algorithm, kind, is_counted)] for is_counted in (True, False))
    theirs, script = figures[f"{equivalent.title}, {kind}"], figures["versioned"]
    return {
        "algorithm": equivalent.algorithm,
        "peer": equivalent.peer,
        "title": equivalent.title,
        "kind": kind,
        "server_us": round(min(counted.server), 3),
        "uncounted_us": round(min(uncounted.server), 3),
        "their_server_us": round(min(theirs.server), 3),
        "server_ratio": round(min(counted.server) / min(theirs.server), 3),
        "uncounted_ratio": round(min(uncounted.server) / min(theirs.server), 3),
        "whole_us": round(median(counted.whole), 3),
        "their_whole_us": round(median(theirs.whole), 3),
        "whole_ratio": round(median(a / b for a, b in zip(counted.whole, theirs.whole, strict=True)), 3),
        "bare_server_ratio": round(min(script.server) / min(theirs.server), 3),
        "bare_whole_ratio": round(median(a / b for a, b in zip(script.whole, theirs.whole, strict=True)), 3),
    }


def _claims(results: Sequence[dict[str, Any]]) -> tuple[list[report.Claim], list[report.Claim]]:
    """Return the promises and the targets: for each package and kind the largest ratio of its algorithms."""
    claims, targets = [], []
    for peer in dict.fromkeys(one["peer"] for one in results):
        for kind in _KINDS:
            rows = [one for one in results if (one["peer"], one["kind"]) == (peer, kind)]
            in_total = max(one["whole_ratio"] for one in rows)
            text = f"{kind}: the largest ratio of our time to the time of {peer}"
            claims.append(report.Claim(f"{text}, in total", 1, in_total))
            targets.append(report.Claim(f"{text}, in total", IN_TOTAL, in_total))
            on_server = max(one["server_ratio"] for one in rows)
            targets.append(report.Claim(f"{text}, on the server", ON_SERVER, on_server))
    return claims, targets


def rows_of(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of the table. A ratio above its target has a star."""

    def starred(ratio: float, bound: float) -> str:
        return f"{ratio:.2f}{'' if ratio <= bound else ' *'}"

    rows: list[tuple[Any, ...]] = [
        (
            f"`{one['algorithm']}` beside {one['title']}",
            one["kind"],
            one["server_us"],
            one["uncounted_us"],
            one["their_server_us"],
            starred(one["server_ratio"], ON_SERVER),
            starred(one["uncounted_ratio"], ON_SERVER),
            one.get("bare_server_ratio"),
            starred(one["whole_ratio"], IN_TOTAL),
            one.get("bare_whole_ratio"),
        )
        for one in run["results"]
    ]
    return [*rows, ("to compare the version of the rules (bare script)", None, run["version_us"], *[None] * 7)]


COLUMNS = (
    "this app beside another package",
    "request",
    "ours, server, µs",
    "without counting, µs",
    "theirs, server, µs",
    "ours ÷ theirs, server",
    "without counting ÷ theirs",
    "bare script ÷ theirs, server",
    "ours ÷ theirs, in total",
    "bare script ÷ theirs, in total",
)


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    out = [report.table(COLUMNS, rows_of(run))]
    if run["missing"]:
        out.append(f"Not installed, so not measured: {', '.join(run['missing'])}.")
    return "\n\n".join([*out, report.claims_table(run["claims"]), report.claims_table(run["targets"], "target")])


if __name__ == "__main__":
    sys.exit(main())
