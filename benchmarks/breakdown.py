"""Measure where the time of one request goes: layer by layer, from a round trip to the throttle, and in single steps.

    python -m benchmarks.breakdown

The time of a layer includes the layers before it. All layers are timed in turns on one core, and the table shows the
time that each layer adds. A step is timed alone in a loop. So a step is faster than in a request, where other code has
used the processor's caches. The last table shows functions within a request, without the time of other listed functions
that they call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.support import report, servers
from benchmarks.support.timing import Case, Timed, interleaved


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breakdown", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds that every layer takes part in")
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each layer in each round")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    core = servers.cores()[0]
    with servers.redis_server(core) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database))
        from benchmarks.measured import in_place, inside, ours

        ours.save_rules()
        servers.pin(core)
        machine_info = report.machine(redis_server.url)
        layer_cases, step_cases = layers(redis_server.url), steps()
        timed = interleaved([*layer_cases, *step_cases], options.rounds, options.calls)
        functions = inside.watch(in_place.throttle_call("ours"), options.rounds * options.calls)
    run = report.run_json(
        "breakdown",
        {**machine_info, "load_after": report.load()},
        vars(options),
        [],
        layers=_added([timed[case.name] for case in layer_cases]),
        steps={case.name: timed[case.name].to_json() for case in step_cases},
        inside=functions,
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _added(timed: list[Timed]) -> dict[str, dict[str, Any]]:
    """Return each layer, with the time that it adds to the layer before it.

    This time is the median, over all rounds, of the difference between the two layers.
    """
    out, before = {}, None
    for result in timed:
        adds = (
            result.medians if before is None else [a - b for a, b in zip(result.medians, before.medians, strict=True)]
        )
        out[result.case.name] = {**result.to_json(), "adds_us": round(median(adds) / 1000, 3)}
        before = result
    return out


def layers(url: str) -> list[Case]:
    """Return the layers, from a round trip up to the throttle. Three rules limit the key, and usage is metered."""
    from benchmarks.measured import floors, in_place, ours
    from benchmarks.support.pipelines import run_of
    from ratelimits.engine.assemble.scripts import resp
    from ratelimits.engine.call import new_nonce
    from ratelimits.engine.command import Command
    from ratelimits.engine.decide import decide_call
    from ratelimits.quota import checking, waiting
    from ratelimits.quota.costs import ONE_REQUEST

    server, raw = ours.engine_server(), floors.RawSocket(url)
    command = Command(server.keyspace, ours.call_of(ours.three_limits(), time.time_ns() // 1000))
    ours.deciding(server, command.call)()
    with redis.Redis.from_url(url) as client:
        run_id = run_of(client)
    floors.load(url)
    bare = floors.bare(*floors.THREE_RULES)
    # The smallest write. It shows the time that the append-only file adds to a round trip.
    small = resp(b"SET", b"breakdown", b"1")

    someone = ours.someone("42")

    def check() -> object:
        return checking.check(someone, "three", "GET").allowed

    def check_and_wait() -> object:
        return waiting.check_and_wait(someone, "three", "GET", ONE_REQUEST).allowed

    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("ping", "raw PING", lambda: raw.exchange(floors.PING)),
        ("write", "a SET instead of the PING: the append-only file", lambda: raw.exchange(small)),
        ("bare", "the bare script instead", lambda: raw.exchange(bare)),
        (
            "script",
            "the script of a decision instead, on the raw socket",
            lambda: raw.exchange(command.to_bytes(run_id, new_nonce())),
        ),
        ("wire", "wire.call: use redis-py's connection and parser", lambda: server.wire.call(command, new_nonce())),
        ("engine", "decide_call: make the Decision", lambda: decide_call(server, command.call, command).allowed),
        ("check", "quota.check: find the rules and the command, make the Answer", check),
        ("wait", "check_and_wait: count the requests that wait", check_and_wait),
        ("throttle", "QuotaThrottle: find the caller and the cost, make the headers", in_place.throttle_call("ours")),
    ]
    return [Case(f"layer_{name}", title, "ours", call) for name, title, call in calls]


def steps() -> list[Case]:
    """Return single steps of this app's Python code."""
    from benchmarks.measured import in_place, ours
    from benchmarks.support.pipelines import run_of
    from ratelimits import rules
    from ratelimits.addresses import address_of
    from ratelimits.answers import headers
    from ratelimits.answers.answer import Answer
    from ratelimits.engine.call import new_nonce
    from ratelimits.engine.command import Command
    from ratelimits.engine.server import current_server
    from ratelimits.identity import Identity, identify
    from ratelimits.quota import checking, costs
    from ratelimits.quota.costs import ONE_REQUEST, costs_of
    from ratelimits.throttling import QuotaThrottle

    request, server = in_place.drf_request(), ours.engine_server()
    answer = checking.check(ours.someone("42"), "three", "GET")
    rule, decision = answer.binding, answer.decision
    assert rule is not None
    assert decision is not None
    now, quoted = time.time_ns() // 1000, headers.quoted(rule.name)
    command = Command(server.keyspace, ours.call_of(ours.three_limits(), now))
    run_id = run_of(current_server().wire.client)
    at_once = False  # if it were true, a request that must wait would be refused
    # `cache_key` is the key of a kind of request in the caches of quota. `equal_key` is another object that is equal to
    # `cache_key`.
    cache_key = (Identity("user:42", None, "account:7", "ip:203.0.113.9"), "three", "GET", at_once, ("requests", 1))
    cached = {cache_key: 1}
    equal_key = (Identity("user:42", None, "account:7", "ip:203.0.113.9"), *cache_key[1:])
    calls: list[tuple[str, Callable[[], object]]] = [
        ("identify(request)", lambda: identify(request)),
        ("part of it: address_of(request)", lambda: address_of(request)),
        ("Identity(…)", lambda: Identity("user:42", None, "account:7", "ip:203.0.113.9")),
        ("a dict look-up by the key of a request: hash and compare an Identity", lambda: cached.get(equal_key)),
        ("answer.headers()", answer.headers),
        (
            "part of it: headers.ratelimit_field()",
            lambda: headers.ratelimit_field(quoted, decision.remaining, decision.reset_after),
        ),
        ("answer.binding", lambda: answer.binding),
        ("rules.current()", rules.current),
        ("current_server()", current_server),
        ("costs.valid_costs(costs)", lambda: costs.valid_costs(ONE_REQUEST)),
        ("costs_of(None)", lambda: costs_of(None)),
        ("new_nonce()", new_nonce),
        ("command.to_bytes(run, nonce)", lambda: command.to_bytes(run_id, b"0123456789abcdef")),
        ("Answer(…)", lambda: Answer(True, decision, answer.prepared, 0.0, 0.0)),
        ("QuotaThrottle()", QuotaThrottle),
        (
            "a command that is not prepared: Command(…)",
            lambda: Command(server.keyspace, ours.call_of(ours.three_limits(), now, user="43")),
        ),
    ]
    return [Case(f"step_{title}", title, "ours", _always_true(call), inner=20) for title, call in calls]


def _always_true(call: Callable[[], object]) -> Callable[[], object]:
    # A case must return a true value, but a step need not. A tuple with one item is true. The wrapper adds the time of
    # one function call.
    return lambda: (call(),)


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (result["title"], result["median_us"], result["adds_us"], result["min_us"]) for result in run["layers"].values()
    ]
    ordered = sorted(run["steps"].values(), key=lambda result: -result["median_us"])
    inside = run["inside"]
    functions = [
        (result["function"], result["calls"], result["own_us"], result["low_us"]) for result in inside["functions"]
    ]
    whole = f"{inside['whole_us']:,.1f} µs a request, {inside['wrapped_us']:,.1f} with all wrappers"
    missing = [f"No longer in the code, so not watched: {', '.join(inside['missing'])}."] if inside["missing"] else []
    return "\n\n".join(
        [
            report.table(("layer, with all layers above it", "median µs", "adds µs", "smallest µs"), rows),
            report.table(
                ("step, by itself", "median µs", "smallest µs"),
                [(result["title"], result["median_us"], result["min_us"]) for result in ordered],
            ),
            report.table((f"function, in place ({whole})", "calls", "own µs", "10th percentile"), functions),
            *missing,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
