"""Measure how long it takes to close a month with many accounts and many gaps, on PostgreSQL and on SQLite.

    python -m benchmarks.closing [--accounts 20000] [--keys 5] [--gaps 20000] [--out DIR]

Each account is on a plan with an included quantity, and has one ledger line for each of its keys. The closing runs in
its own process, as the Celery task does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import report, servers

DATABASES = ("postgres", "sqlite")
#: Maximum number of seconds to close a month.
BOUNDS = {"postgres": 180, "sqlite": 300}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.closing", description=__doc__.splitlines()[0])
    parser.add_argument("--accounts", type=int, default=20_000, help="accounts that have usage in the month")
    parser.add_argument("--keys", type=int, default=5, help="keys of each account")
    parser.add_argument("--gaps", type=int, default=20_000, help="gaps that are declared in the month")
    parser.add_argument("--database", choices=DATABASES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", choices=("fill", "close"), help=argparse.SUPPRESS)  # see `_process`
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        servers.start_django({}, tables=options.process == "fill")
        print(json.dumps({"fill": fill, "close": close}[options.process](options)))
        return 0
    with servers.redis_server(None) as redis_server:
        machine_info = report.machine(redis_server.url, ("psycopg",))
    results = {}
    for kind in options.database or DATABASES:
        with servers.redis_server(None) as redis_server, servers.database(kind) as url:
            environment = {**os.environ, **servers.environment(redis_server, url)}
            print(f"{kind}: {options.accounts:,} accounts, {options.gaps:,} gaps", file=sys.stderr, flush=True)
            _process("fill", options, environment)
            results[kind] = _process("close", options, environment)
    claims = [
        report.Claim(f"a month of {options.accounts:,} accounts closed on {kind}, s", BOUNDS[kind], result["seconds"])
        for kind, result in results.items()
    ]
    run = report.run_json(
        "closing", {**machine_info, "load_after": report.load()}, vars(options), claims, results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _process(what: str, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Run the function `what` ("fill" or "close") in a new process, and return its result."""
    sizes = [f"--{name}={getattr(options, name)}" for name in ("accounts", "keys", "gaps")]
    command = [sys.executable, "-m", "benchmarks.closing", "--process", what, *sizes]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fill(options: argparse.Namespace) -> dict[str, Any]:
    """Write last month's usage to the ledger, and declare the gaps. Return the number of lines."""
    from benchmarks.measured.usage import declare_gaps, make_accounts, month
    from benchmarks.measured.usage import fill as fill_redis
    from ratelimits.usage.ledger.drain import drain
    from ratelimits.usage.ledger.tally import tally
    from ratelimits.usage.periods import month_in

    make_accounts(options.accounts)
    keys = options.accounts * options.keys
    fill_redis(0, keys, keys, options.keys)
    drained = drain()
    tally()
    start, end = month_in(month(), "UTC")
    declare_gaps(options.gaps, start, end)
    return {"lines": drained.lines}


def close(options: argparse.Namespace) -> dict[str, Any]:
    """Close the month. Return the seconds, the number of reports, and the growth of the process's memory."""
    from benchmarks.measured.usage import month
    from ratelimits.billing.models import Report
    from ratelimits.billing.reports.closing.close import finalise_each
    from ratelimits.usage.models import ShardState
    from ratelimits.usage.periods import month_in

    _month_start, month_end = month_in(month(), "UTC")
    # A month can be closed GRACE_SECONDS (one hour) after its end, if the watermark of each shard has passed this
    # moment too.
    now = month_end + 2 * 3_600_000_000  # µs
    ShardState.objects.update(watermark=now)
    start, processor = time.perf_counter(), time.process_time()
    resident = [_resident_mb() for _closed in finalise_each(now)]
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    reports = Report.objects.count()
    assert reports == options.accounts, reports
    return {
        "seconds": round(seconds, 1),
        # The processor time of this process. Other work on the machine makes the seconds longer, but not this time.
        "processor_seconds": round(processor, 1),
        "reports": reports,
        "ms_per_report": round(seconds / reports * 1000, 2),
        "resident_mb": round(max(resident), 1),
        # Growth since the first tenth of the accounts was closed: it shows whether memory grows with the number of
        # accounts.
        "grows_mb": round(max(resident) - resident[len(resident) // 10], 1),
    }


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (kind, *(result[name] for name in ("reports", "seconds", "processor_seconds", "resident_mb", "grows_mb")))
        for kind, result in run["results"].items()
    ]
    heads = ("closing", "reports", "seconds", "processor time, s", "resident, MB", "grows by, MB")
    return "\n\n".join([report.table(heads, rows), report.claims_table(run["claims"])])


if __name__ == "__main__":
    sys.exit(main())
