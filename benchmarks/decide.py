"""Measure the time of a decision in this app and in other packages, and the shortest possible time.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.decide [--out DIR]

A round trip and a bare script show the shortest possible time. All cases are timed in turns on one core, which client
and server share. So a time includes all work of client and server.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from benchmarks.support import report, servers
from benchmarks.support.timing import Case, interleaved
from ratelimits import background


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds that every case takes part in")
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each case in each round")
    parser.add_argument("--core", type=int, help="the core for client and server (default: the last)")
    parser.add_argument("--server", type=servers.binary, help=servers.SERVER_HELP)
    parser.add_argument("--only", help="measure only PING and the cases whose names contain this text")
    parser.add_argument("--threads", type=int, default=8, help="threads of the throughput test")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each throughput measurement")
    parser.add_argument(
        "--refusals", type=int, default=100_000, help="number of refusals in a row, to count their commands"
    )
    parser.add_argument("--out", type=Path, help="directory for the run's JSON and chart")
    return parser.parse_args(argv)


def commands_sent(client: redis.Redis) -> int:
    """Return how often clients have called scripts so far."""
    stats: Any = client.info("commandstats")
    return sum(result["calls"] for name, result in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))


def latency_claims(ratios: dict[str, dict[str, float]], results: dict[str, Any]) -> list[report.Claim]:
    """Return the promises about single decisions.

    `ratios[one][other]` is the time of the case `one`, divided by the time of the case `other`.
    """
    claims = [
        report.Claim(f"time of a decision, {text}, × that of the bare script", bound, ratios[name][bare])
        for name, bare, text, bound in (
            ("engine_one", "bare_one", "one rule", 1.6),
            ("engine_three", "bare_three", "3 rules on one key + metering", 1.6),
            ("engine_kinds", "bare_kinds", "user + account + global + metering", 1.5),
            ("engine_ten", "bare_three", "10 limits + metering (bare script: 3 rules)", 2.0),
        )
        if name in ratios and bare in ratios[name]
    ]
    if "engine_three" in ratios:
        claims += [
            report.Claim(
                f"{text}: time ÷ our time with 3 rules + metering", bound, 1 / ratios["engine_three"][name], least=True
            )
            for name, text, bound in (
                ("drf_one", "DRF's throttle", 3),
                ("drf_three", "three of DRF's throttles", 7),
            )
            if name in results
        ]
    if "engine_one" in ratios:
        best: dict[str, float] = {}  # name of a package -> the ratio of its fastest algorithm
        for name, result in results.items():
            if result["peer"] and result["peer"] != "djangorestframework":
                best[result["peer"]] = min(best.get(result["peer"], 1e9), 1 / ratios["engine_one"][name])
        claims += [
            report.Claim(f"{peer}, fastest algorithm: time ÷ our time with one rule", 1, ratio, least=True)
            for peer, ratio in best.items()
        ]
    for name, text, bound in (
        ("engine_ahead", "a decision with prefetched permits", 0.1),
        ("engine_refused", "a refusal found in the deny cache", 0.05),
        ("check_blocked", "a blocked key in quota", 0.2),
        ("check_blocked_network", "a blocked network in quota", 0.2),
        ("throttle_refused", "a refusal by the throttle from the deny cache", 0.5),
    ):
        if name in ratios:
            claims.append(report.Claim(f"{text}, × raw PING", bound, ratios[name]["ping"]))
    return claims


def in_place_claims(places: dict[str, dict[str, Any]]) -> list[report.Claim]:
    """Return the promises about the time that the throttle adds to a request."""
    adds = {name: result["adds_us"] for name, result in places.items() if "adds_us" in result}
    if not {"ours", "ping", "drf_one", "drf_three"} <= adds.keys():
        return []
    return [
        report.Claim("time added to a request, × the time that a raw PING adds", 3, places["ours"]["times_ping"]),
        report.Claim(
            "time added to a request, × the time that one DRF throttle adds", 0.6, adds["ours"] / adds["drf_one"]
        ),
        report.Claim(
            "time added to a request, × the time that three DRF throttles add", 0.24, adds["ours"] / adds["drf_three"]
        ),
    ]


def in_place_targets(places: dict[str, dict[str, Any]]) -> list[report.Claim]:
    """Return the targets for the time that the throttle adds to a request."""
    measured = ("ours", "ours_kinds")
    return [
        report.Claim(f"{places[name]['title']}: time added to a request, × the time that a raw PING adds", 2.5, ratio)
        for name in measured
        if (ratio := places.get(name, {}).get("times_ping")) is not None
    ]


def chosen(cases: list[Case], only: str | None, always: str) -> list[Case]:
    """Return the case named `always`, and the cases whose names contain the text `only` (None: all cases)."""
    return [case for case in cases if only is None or only in case.name or case.name == always]


def tell(text: str) -> None:
    """Print a message on standard error: standard output is for the tables."""
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    available = servers.cores()
    core = available[0] if options.core is None else options.core
    with servers.redis_server(core, options.server) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database))
        run = measure(options, redis_server.url, core, available)
        # Write the last process totals now, because the database is deleted at the end of this block.
        background.end()
    print(text_of(run))
    report.write(run, options.out, {"decide": chart(run)})
    return 0


def measure(options: argparse.Namespace, url: str, core: int, available: list[int]) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.measured import floors, in_place, ours, peers, threads

    # `server_url` has no database number, because the other packages use another database of the same server.
    server_url, now = url.rpartition("/")[0], time.time_ns() // 1000
    machine_info = report.machine(url, peers.PACKAGES)
    absent = peers.missing()
    for name in absent:
        tell(f"{name} is not installed and left out: pip install -r benchmarks/requirements.txt")
    ours.save_rules()
    ours.save_blocks()
    servers.pin(core)

    def progress(number: int) -> None:
        tell(f"round {number + 1} of {options.rounds}")

    cases = [*floors.cases(url), *ours.cases(now), *in_place.throttle_cases(), *peers.cases(server_url)]
    cases = chosen(cases, options.only, "ping")
    timed = interleaved(cases, options.rounds, options.calls, progress=progress)
    ratios = {name: {other: result.ratio(timed[other]) for other in timed} for name, result in timed.items()}
    results = {
        name: {**result.to_json(), "times_ping": round(ratios[name]["ping"], 3)} for name, result in timed.items()
    }
    times_deny_cache = {
        name: round(ratios[name]["check_refused"], 2)
        for name in ("check_blocked", "check_blocked_network")
        if "check_refused" in ratios and name in ratios
    }
    places = in_place.summary(interleaved(in_place.cases(), options.rounds, options.calls, progress=progress))
    claims = [*latency_claims(ratios, results), *in_place_claims(places)]

    with redis.Redis.from_url(url) as client:
        sent = ours.refusals_sent(options.refusals, lambda: commands_sent(client))
        blocked = ours.blocked_sent(options.refusals, client)
    text = f"commands sent to decide {options.refusals:,} blocked requests"
    claims.append(report.Claim(text, 0, blocked["to_decide"]))
    text = f"time of each of {options.refusals:,} blocked requests in quota, with counting it, × raw PING"
    claims.append(report.Claim(text, 0.2, blocked["us_each"] / results["ping"]["median_us"]))
    claims.append(report.Claim(f"commands sent for {options.refusals:,} refusals in a row", 200, sent))

    # For throughput, the server has its own core if the machine has more than one.
    client_core = next((other for other in available if other != core), core)
    servers.pin(client_core)
    throughput = threads.compare(url, now, options.threads, options.seconds, max(options.rounds // 12, 1))
    text = f"{options.threads} threads: decisions/s, × those of redis-py's pooled client"
    claims.append(report.Claim(text, 1.5, throughput["ratio"], least=True))
    targets = [*in_place_targets(places), report.Claim(text, 3, throughput["ratio"], least=True)]
    # Name of a case of this app -> name of a case that is not of this app -> ratio.
    our_ratios = {
        name: {other: round(ratio, 3) for other, ratio in ratios[name].items() if results[other]["kind"] != "ours"}
        for name, result in results.items()
        if result["kind"] == "ours"
    }
    return report.run_json(
        "decide",
        {**machine_info, "load_after": report.load()},
        vars(options),
        claims,
        targets,
        missing=absent,
        results=results,
        ratios=our_ratios,
        in_place=places,
        refusals={"refusals": options.refusals, "commands": sent},
        blocked={"requests": options.refusals, "blocks": ours.BLOCKS, **blocked, "times_deny_cache": times_deny_cache},
        throughput=throughput,
    )


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    ratios = run["ratios"]
    ours_by_name = {"engine_one": "× our 1 rule", "engine_three": "× our 3", "check_three": "× our check"}
    columns = [name for name in ours_by_name if name in ratios]
    rows = [
        (
            result["title"],
            result["kind"],
            result["median_us"],
            result["p99_us"],
            result["times_ping"],
            *(None if result["kind"] == "ours" else 1 / ratios[column][name] for column in columns),
        )
        for name, result in run["results"].items()
    ]
    heads = [ours_by_name[name] for name in columns]
    out = [report.table(("decision", "", "median µs", "p99 µs", "× PING", *heads), rows)]
    rows = [
        (result["title"], result["median_us"], result["p99_us"], result.get("adds_us"), result.get("times_ping"))
        for result in run["in_place"].values()
    ]
    out.append(report.table(("request, in place", "median µs", "p99 µs", "adds µs", "adds × PING"), rows))
    throughput = run["throughput"]
    out.append(
        report.table(
            (
                f"one process, {throughput['threads']} threads",
                "decisions/s",
                "use of the client's core",
                "use of the server's core",
            ),
            [
                (title, *(throughput[f"{name}_{column}"] for column in ("per_second", "process_busy", "server_busy")))
                for name, title in (("ours", "ours"), ("pooled", "redis-py, pooled"))
            ],
        )
    )
    out.append(f"{run['refusals']['refusals']:,} refusals in a row sent {run['refusals']['commands']:,} commands.")
    blocked = run["blocked"]
    out.append(
        f"{blocked['requests']:,} blocked requests sent {blocked['to_decide']:,} commands to decide and"
        f" {blocked['to_count']:,} to count them. They took {blocked['us_each']:.1f} µs each, while"
        f" {blocked['blocks']:,} other blocks were in force."
    )
    for name, times in blocked["times_deny_cache"].items():
        title = run["results"][name]["title"]
        out.append(f"{title}: {times:.2f} times as long as a refusal that the deny cache repeats in quota.check.")
    if run["missing"]:
        out.append(f"Not installed, so not measured: {', '.join(run['missing'])}.")
    out += [report.claims_table(run["claims"]), report.claims_table(run["targets"], "target")]
    load = ", ".join(map(str, run["machine"]["load"]))
    out.append(f"{run['machine']['processor']}; {run['machine']['server']}; load of the machine before the run: {load}")
    return "\n\n".join(out)


def chart(run: dict[str, Any]) -> str:
    """Return all decisions for the chart, as multiples of a raw PING."""
    ordered = sorted(run["results"].values(), key=lambda result: result["times_ping"])
    bars = [(result["title"], result["times_ping"], result["kind"]) for result in ordered]
    return report.bar_chart(
        "One decision, client and server on one core", "multiples of a raw-socket PING; the median of all rounds", bars
    )


if __name__ == "__main__":
    sys.exit(main())
