"""Compare pairs of throttles: ours and DRF's own; with and without metrics; with and without a lasting limit.

    python -m benchmarks.pairs.throttles [--out DIR]

All throttles are timed in turns, on one core, which client and server share.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import report, servers
from benchmarks.support.timing import Case, Timed, interleaved

#: Name of a case -> its description, and the description of the case with which it is compared (named "<name> beside").
PAIRS = {
    "one": ("a drop-in throttle, 10 requests a minute", "DRF's own throttle"),
    "many": ("a drop-in throttle, 1,000 requests a minute", "DRF's own throttle"),
    "three": ("three drop-in throttles, 10 requests a minute", "three of DRF's own throttles"),
    "prometheus": ("QuotaThrottle, 3 rules, with metrics for Prometheus", "without metrics"),
    "opentelemetry": ("QuotaThrottle, 3 rules, with OpenTelemetry's metrics and spans", "without both"),
    "lasting": ("QuotaThrottle, a monthly limit that outlives Redis", "a monthly limit that does not"),
    "noise": ("QuotaThrottle, a monthly limit that does not outlive Redis", "the same limit of another user"),
}
#: Name of a pair -> the number of throttles of the view, and the number of requests that each throttle has in its
#: memory.
_RATED = {"one": (1, 10), "many": (1, 1000), "three": (3, 10)}
#: Promises: the largest ratio of the times of a pair.
MAX_TIMES = {"one": 1.5, "many": 1.5, "three": 1.0, "lasting": 1.02}

#: Name of a case -> whether its monthly limit outlives Redis.
_MONTHS = {"lasting": True, "lasting beside": False, "noise": False, "noise beside": False}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.throttles", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds that every throttle takes part in")
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each throttle in each round")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    core = servers.cores()[0]
    with servers.redis_server(core) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database))
        from benchmarks.measured import ours

        ours.save_rules()
        servers.pin(core)
        machine_info = report.machine(redis_server.url, ("prometheus-client", "opentelemetry-sdk"))
        timed = interleaved([*_rated(), *_watched(), *_lasting()], options.rounds, options.calls)
    results = {name: _pair(timed[name], timed[f"{name} beside"]) for name in PAIRS}
    claims = [
        report.Claim(f"{PAIRS[name][0]}, × {PAIRS[name][1]}", bound, results[name]["times"])
        for name, bound in MAX_TIMES.items()
    ]
    run = report.run_json(
        "pairs.throttles", {**machine_info, "load_after": report.load()}, vars(options), claims, results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _pair(one: Timed, other: Timed) -> dict[str, float]:
    medians = {"us": one.to_json()["median_us"], "beside_us": other.to_json()["median_us"]}
    return {**medians, "times": round(one.ratio(other), 2)}


def _rated() -> list[Case]:
    """Return the cases of throttles with rates in code: ours, and DRF's own."""
    from rest_framework.throttling import UserRateThrottle as Theirs

    from ratelimits.throttling import UserRateThrottle as Ours

    return [
        Case(f"{name}{suffix}", f"{name}{suffix}", kind, _asking(base, count, remembered))
        for name, (count, remembered) in _RATED.items()
        for suffix, kind, base in (("", "ours", Ours), (" beside", "peer", Theirs))
    ]


def _asking(base: type[Any], count: int, remembered: int) -> Callable[[], object]:
    """Return a function that asks all throttles of a view, as `APIView.check_throttles` does, with a new request.

    The throttles use a simulated clock, which moves by the same time at each request. So a throttle always remembers
    the same number of requests. This matters because DRF's own throttle writes all remembered requests at each request.
    """
    from rest_framework.request import Request
    from rest_framework.views import APIView

    from benchmarks.measured.peers import user_request

    plain = user_request()
    moments = itertools.count(1_800_000_000.0, 60 / remembered)

    class View(APIView):
        # A rate above the number of remembered requests, so that nothing is refused.
        throttle_classes = [
            type("Steady", (base,), {"rate": f"{remembered + number}/m", "scope": f"{remembered}-{count}-{number}"})
            for number in range(2, count + 2)
        ]

    view: Any = View()
    view.headers = {}

    def ask() -> object:
        now = next(moments)
        request = Request(plain)
        request.user = plain.user
        throttles = view.get_throttles()
        for throttle in throttles:
            throttle.timer = lambda: now
        return all([throttle.allow_request(request, view) for throttle in throttles])  # noqa: C419

    for _request in range(remembered):
        ask()
    return ask


def _watched() -> list[Case]:
    """Return the cases of QuotaThrottle with and without observers."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from benchmarks.measured import in_place
    from ratelimits.answers import observing

    # No exporter is set, so finished spans are dropped: a project chooses how to send spans, and sends them in another
    # thread.
    trace.set_tracer_provider(TracerProvider())
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
    from ratelimits.telemetry import opentelemetry, prometheus

    ask, cases = in_place.throttle_call("ours"), []

    def observed_by(*observers: Callable[[observing.Observation], None]) -> Callable[[], None]:
        def begin() -> None:
            observing.observers[:] = observers

        return begin

    for name, observe in (("prometheus", prometheus.observe), ("opentelemetry", opentelemetry.observe)):
        cases += [
            Case(name, name, "ours", ask, before=observed_by(observe)),
            Case(f"{name} beside", f"{name} beside", "ours", ask, before=observed_by()),
        ]
    return cases


def _lasting() -> list[Case]:
    """Return the cases of a monthly limit. Each case has its own user, plan and rule; only one rule outlives Redis."""
    from benchmarks.measured import in_place, ours
    from ratelimits import rules
    from ratelimits.models import Plan, PlanMembership

    cases = []
    # The users have the ids 4001, 4002 and so on, which no other case uses.
    for user, (name, lasting) in enumerate(_MONTHS.items(), 4001):
        slug = name.replace(" ", "-")
        plan = Plan.objects.create(name=name, slug=slug)
        PlanMembership.objects.create(key=f"user:{user}", plan=plan)
        rule = ours.row(slug, "month", "*", plan=plan, lasting=lasting)
        rule.full_clean()
        rule.save()
        # These users have no other rules: no rule names the scope of this view.
        cases.append(Case(name, name, "ours", in_place.throttle_call("unlimited", user)))
    rules.forget()
    return cases


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [(*PAIRS[name], one["us"], one["beside_us"], one["times"]) for name, one in run["results"].items()]
    table = report.table(("first throttle", "second throttle", "first, µs", "second, µs", "first ÷ second"), rows)
    return f"{table}\n\n{report.claims_table(run['claims'])}"


if __name__ == "__main__":
    sys.exit(main())
