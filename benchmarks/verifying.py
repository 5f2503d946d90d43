"""Measure how long it takes to verify a month's reports, and to write and compare its manifest (a signed list).

    python -m benchmarks.verifying [--accounts 5000 20000] [--keys 2] [--out DIR]

Each number of accounts has its own database and processes. The time of one report is compared between the numbers of
accounts, because this time must not grow with the number of reports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import closing
from benchmarks.support import report, servers

#: Promise: the time of one report is at most this many times the time with the first number of accounts.
MAX_RATIO = 1.5


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifying", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--accounts",
        type=int,
        nargs="+",
        default=[5_000, 20_000],
        help="numbers of accounts; each has its own database",
    )
    parser.add_argument("--keys", type=int, default=2, help="keys of each account")
    parser.add_argument("--database", choices=closing.DATABASES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--process", choices=("fill", "manifest", "verify"), help=argparse.SUPPRESS)  # see `_process`
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.process:
        servers.start_django({}, tables=options.process == "fill")
        print(json.dumps({"fill": fill, "manifest": manifest, "verify": verify}[options.process](options)))
        return 0
    with servers.redis_server(None) as redis_server:
        machine_info = report.machine(redis_server.url, ("psycopg",))
    results: list[dict[str, Any]] = []
    for kind in options.database or closing.DATABASES:
        for accounts in options.accounts:
            with servers.redis_server(None) as redis_server, servers.database(kind) as url:
                environment = {**os.environ, **servers.environment(redis_server, url)}
                print(f"{kind}: {accounts:,} accounts", file=sys.stderr, flush=True)
                _process("fill", accounts, options, environment)
                for what in ("manifest", "verify"):
                    result = _process(what, accounts, options, environment)
                    results.append({"database": kind, "what": what, "reports": accounts, **result})
    claims = [
        report.Claim(
            f"{result['what']} on {result['database']}: time of one report, × its time with fewer reports",
            MAX_RATIO,
            ratio,
        )
        for result, ratio in _ratios(results)
    ]
    run = report.run_json(
        "verifying", {**machine_info, "load_after": report.load()}, vars(options), claims, results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _ratios(results: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], float]]:
    """Yield each result except the first one of its database and command, with a ratio.

    The ratio is the time per report, divided by the time per report of this first result.
    """
    first: dict[tuple[str, str], float] = {}
    for result in results:
        compared, time_per_report = (result["database"], result["what"]), result["ms_per_report"]
        if compared in first:
            yield result, round(time_per_report / first[compared], 2)
        else:
            first[compared] = time_per_report


def _process(what: str, accounts: int, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Run the function `what` ("fill", "manifest" or "verify") in a new process, and return its result."""
    command = [sys.executable, "-m", "benchmarks.verifying", "--process", what]
    command += [f"--accounts={accounts}", f"--keys={options.keys}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fill(options: argparse.Namespace) -> dict[str, Any]:
    """Write last month's usage to the ledger, and close the month."""
    options.accounts, options.gaps = options.accounts[0], 0
    closing.fill(options)
    return closing.close(options)


def manifest(options: argparse.Namespace) -> dict[str, Any]:
    """Write the month's manifest."""
    from benchmarks.measured.usage import month
    from ratelimits.billing.reports.verify.manifest import build

    return _timed(options.accounts[0], lambda: json.dumps(build("default", month())))


def verify(options: argparse.Namespace) -> dict[str, Any]:
    """Verify everything with the month's manifest."""
    from benchmarks.measured.usage import month
    from ratelimits.billing.reports.verify.manifest import build
    from ratelimits.billing.verification import Verification

    verification = Verification(manifests=[build("default", month())])

    def run() -> None:
        found = list(verification.findings())
        assert not found, found[:3]

    done = _timed(options.accounts[0], run)
    assert verification.checked["reports"] == options.accounts[0], verification.summary()
    print(verification.summary(), file=sys.stderr)
    return done


def _timed(reports: int, run: Callable[[], Any]) -> dict[str, Any]:
    """Call `run`. Return its time, the time for each report, and how much more memory this process used at its peak."""
    start, resident = time.perf_counter(), closing._resident_mb()
    run()
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "ms_per_report": round(seconds / reports * 1000, 2),
        "grows_mb": round(_peak_mb() - resident, 1),
    }


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    heads = ("database", "what", "reports", "seconds", "ms per report", "grows by, MB")
    names = ("database", "what", "reports", "seconds", "ms_per_report", "grows_mb")
    rows = [tuple(result[name] for name in names) for result in run["results"]]
    return "\n\n".join([report.table(heads, rows), report.claims_table(run["claims"])])


if __name__ == "__main__":
    sys.exit(main())
