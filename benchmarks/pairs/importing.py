"""Measure what a project needs to start: Django alone, with the packages that the app needs, and with the app.

    python -m benchmarks.pairs.importing [--rounds 15] [--out DIR]

Each start is a new process. The time is the processor time until `django.setup()` has ended and the entry points are
imported; the memory is what the process then has in use (RSS). Bytecode files exist already. The starts take turns, so
that other work on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.support import report, servers

_DJANGO = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")]
_DRF = ["rest_framework.views", "rest_framework.throttling"]
_REDIS = ["django_redis.cache", "django_redis.client", "redis.asyncio"]
_NEEDED = ["simple_history", "django_redis.cache", "redis.asyncio"]
#: A project of an API without an admin.
_API = ["django.contrib.auth", "django.contrib.contenttypes", "rest_framework"]
#: Name of a start -> its description, the installed apps, and the modules that are imported.
STARTS: dict[str, tuple[str, list[str], list[str]]] = {
    "django": ("Django with its admin", _DJANGO, []),
    "needed": (
        "and what the app needs: redis, django-redis, django-simple-history",
        [*_DJANGO, "simple_history"],
        _NEEDED,
    ),
    "middleware": (
        "and ratelimits, its admin and its middleware",
        [*_DJANGO, "simple_history", "ratelimits", "ratelimits.usage", "ratelimits.billing"],
        [*_NEEDED, "ratelimits.middleware"],
    ),
    "drf": ("Django with its admin and REST framework", [*_DJANGO, "rest_framework"], _DRF),
    "drf_needed": (
        "and what the app needs: redis, django-redis, django-simple-history",
        [*_DJANGO, "rest_framework", "simple_history"],
        [*_DRF, *_NEEDED],
    ),
    "throttles": (
        "and ratelimits, its admin and its throttle classes",
        [*_DJANGO, "rest_framework", "simple_history", "ratelimits", "ratelimits.usage", "ratelimits.billing"],
        [*_DRF, *_NEEDED, "ratelimits.throttling.by_rules"],
    ),
    "api": ("REST framework and django-redis, without an admin", _API, [*_DRF, *_REDIS]),
    "rates": (
        "and the throttle classes with rates in code, without the app",
        _API,
        [*_DRF, *_REDIS, "ratelimits.throttling"],
    ),
    "limits": (
        "and the app of rules, with its throttle class",
        [*_API, "ratelimits"],
        [*_DRF, *_REDIS, "ratelimits.throttling.by_rules"],
    ),
    "usage": (
        "and the app that counts usage too",
        [*_API, "ratelimits", "ratelimits.usage"],
        [*_DRF, *_REDIS, "ratelimits.throttling.by_rules"],
    ),
}
#: The most that the throttle classes with rates in code may add: milliseconds, and MB.
MOST_MS, MOST_MB = 90, 3
#: The most that the app of rules may add.
MOST_MS_OF_LIMITS, MOST_MB_OF_LIMITS = 150, 6
#: Name of a start -> the name of the start with which it is compared.
_BEFORE = {
    "needed": "django",
    "middleware": "needed",
    "drf_needed": "drf",
    "throttles": "drf_needed",
    "rates": "api",
    "limits": "api",
    "usage": "limits",
}
#: The program of each start. It prints its processor time in seconds, the number of imported modules, and its memory in
#: bytes.
_CODE = """
import importlib, json, sys, time
apps, modules = json.loads(sys.argv[1])
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=apps, SECRET_KEY="importing", USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:6379"}},
)
django.setup()
for module in modules:
    importlib.import_module(module)
seconds, count = time.process_time(), len(sys.modules)
import psutil
print(json.dumps((seconds, count, psutil.Process().memory_info().rss)))
"""


class Start(NamedTuple):
    """The processor time of one start, the number of imported modules, and the memory in bytes."""

    seconds: float
    modules: int
    memory: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.importing", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="starts of each kind")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    with servers.redis_server(None) as redis_server:
        machine_info = report.machine(redis_server.url, ("django-simple-history",))
    # These two import what all of them import. They write the bytecode files, and are not measured.
    for name in ("middleware", "throttles"):
        _start(name)
    rounds = [{name: _start(name) for name in STARTS} for _round in range(options.rounds)]
    results = {name: _result(name, rounds) for name in STARTS}
    targets = [
        report.Claim("start with rates in code alone: more processor time, ms", MOST_MS, results["rates"]["more_ms"]),
        report.Claim("start with rates in code alone: more memory, MB", MOST_MB, results["rates"]["more_mb"]),
        report.Claim(
            "start with limits alone: more processor time, ms", MOST_MS_OF_LIMITS, results["limits"]["more_ms"]
        ),
        report.Claim("start with limits alone: more memory, MB", MOST_MB_OF_LIMITS, results["limits"]["more_mb"]),
    ]
    machine_info |= {"load_after": report.load()}
    run = report.run_json("pairs.importing", machine_info, vars(options), [], targets, results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _start(name: str) -> Start:
    """Start a process with the apps of STARTS, which imports the modules."""
    _title, apps, modules = STARTS[name]
    command = [sys.executable, "-W", "ignore", "-c", _CODE, json.dumps((apps, modules))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."})
    return Start(*json.loads(done.stdout))


def _result(name: str, rounds: Sequence[dict[str, Start]]) -> dict[str, Any]:
    """Return the result of a start. `more_ms` and `more_mb` are what it needs more than the start before it."""
    before = _BEFORE.get(name)
    result = {
        "ms": round(1000 * median(starts[name].seconds for starts in rounds), 1),
        "more_ms": None,
        "mb": round(median(starts[name].memory for starts in rounds) / 1e6, 1),
        "more_mb": None,
        "modules": rounds[0][name].modules,
    }
    if before is not None:
        more_seconds = median(starts[name].seconds - starts[before].seconds for starts in rounds)
        more_bytes = median(starts[name].memory - starts[before].memory for starts in rounds)
        result |= {"more_ms": round(1000 * more_seconds, 1), "more_mb": round(more_bytes / 1e6, 1)}
    return result


def rows_of(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of the table."""
    return [
        (STARTS[name][0], one["ms"], one["more_ms"], one["mb"], one["more_mb"], one["modules"])
        for name, one in run["results"].items()
    ]


COLUMNS = (
    "a process that starts",
    "processor time, ms",
    "more than the line above, ms",
    "memory, MB",
    "more than the line above, MB",
    "imported modules",
)


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    return f"{report.table(COLUMNS, rows_of(run))}\n\n{report.claims_table(run['targets'], 'target')}"


if __name__ == "__main__":
    sys.exit(main())
