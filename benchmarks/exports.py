"""Measure how much time and memory it takes to write finalised reports to a file, in every format.

    python -m benchmarks.exports [--rows 1000000] [--format csv] [--database postgres] [--out DIR]

The rows are the lines of finalised reports of one month. Each report has a thousand lines. Each export runs the command
that people use, in its own process.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support import report, servers

if TYPE_CHECKING:
    from ratelimits.billing.models import ReportLine

FORMATS = ("csv", "json", "cloudevents", "cloudevents-ndjson", "xlsx")
MONTH = "2026-11"
#: Start and end of the month, in µs since 1970 UTC.
_START, _END = 1_793_491_200_000_000, 1_796_083_200_000_000
#: 15 minutes, in µs.
_BIN = 900_000_000
_LINES_PER_REPORT = 1000
#: Number of rows in one INSERT.
_CHUNK = 2000


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exports", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="lines of finalised reports")
    parser.add_argument("--format", choices=FORMATS, action="append", help="default: all")
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    results: dict[str, dict[str, Any]] = {}
    with servers.redis_server(None) as redis_server, servers.database(options.database) as url:
        servers.start_django(servers.environment(redis_server, url))
        machine_info = report.machine(redis_server.url, ("psycopg", "XlsxWriter"))
        began = time.perf_counter()
        finalised(options.rows)
        print(f"{options.rows:,} rows made in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        for name in options.format or FORMATS:
            results[name] = export(MONTH, name)
            print(f"{name}: {results[name]['seconds']:.1f} s", file=sys.stderr, flush=True)
        from django.db import connection

        connection.close()
    claims = [
        report.Claim(f"export as {name}, peak memory in MB", 200, result["peak_mb"]) for name, result in results.items()
    ]
    run = report.run_json(
        "exports", {**machine_info, "load_after": report.load()}, vars(options), claims, results=results
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def finalised(count: int) -> None:
    """Write finalised reports of one month with this number of lines in total."""
    from ratelimits.billing.models import Report, ReportLine
    from ratelimits.models.customers import Name, make_missing

    numbers = range(-(-count // _LINES_PER_REPORT))  # rounded up
    names = [f"account-{number:06d}" for number in numbers]
    make_missing("default", names)
    tokens = Name.objects.order_by("identifier").values_list("identifier", "customer__token")
    Report.objects.bulk_create(
        Report(
            customer_id=token,
            account=name,
            period_start=_START,
            period_end=_END,
            timezone="UTC",
            label="2026-11",
            plan="pro",
        )
        for name, token in tokens
    )
    saved_reports = Report.objects.order_by("account").iterator()
    lines = islice((line for saved_report in saved_reports for line in _lines(saved_report)), count)
    while chunk := list(islice(lines, _CHUNK)):
        ReportLine.objects.bulk_create(chunk)


def _lines(saved_report: Any) -> Iterator[ReportLine]:
    """Yield the unsaved lines of a report."""
    from ratelimits.billing.models import ReportLine

    for number in range(1, _LINES_PER_REPORT + 1):
        # The lines have different quantities and times. Each line has the usage of four bins. The month has 2,880 bins,
        # so a line can start in each of the first 2,876.
        used, start = number * 7919 % 100_000, _START + number % 2876 * _BIN
        included = min(used, 60_000)
        yield ReportLine(
            report=saved_report,
            number=number,
            line_id=hashlib.sha256(f"{saved_report.account}:{number}".encode()).hexdigest()[:32],
            key=f"api_key:{saved_report.account[-6:]}-{number}",
            meter="requests",
            unit="requests",
            charge_category="usage",
            charge_period_start=start,
            charge_period_end=start + 4 * _BIN,
            consumed_quantity=used,
            included_quantity=included,
            overage_quantity=used - included,
            refunded_quantity=0,
            admitted_count=used,
            denied_count=number % 13,
            limit="100000",
            rule="monthly",
            rule_version=42,
            plan=saved_report.plan,
            batch_range=f"{number % 64:02d}:{number}-{number + 40}",
            usage_period=_START // 1_000_000,
        )


def export(month: str, form: str) -> dict[str, Any]:
    """Export the reports of a month. Return the seconds, lines and bytes, and the peak memory of the process."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "report"
        command = ["ratelimits_report", "--period", month, "--format", form, "--output", str(output)]
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "django", *command], env=os.environ)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _peak_mb(process.pid))
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise SystemExit(f"ratelimits_report ended with status {process.returncode}: see above")
        with output.open("rb") as file:
            lines = sum(1 for _ in file)
        return {
            "seconds": round(seconds, 3),
            "lines": lines,
            "bytes": output.stat().st_size,
            "peak_mb": round(peak, 1),
        }


def _peak_mb(pid: int) -> float:
    """Return the peak memory of a process so far, in MB.

    This function does not use getrusage, which would also count the memory of the parent process.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    # The line VmHWM ("high water mark") has the peak in units of 1,024 bytes.
    return next((int(line.split()[1]) * 1.024 / 1000 for line in lines if line.startswith("VmHWM")), 0.0)


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (name, run["options"]["rows"] / result["seconds"], result["seconds"], result["peak_mb"], result["bytes"] / 1e6)
        for name, result in run["results"].items()
    ]
    heads = (f"{int(run['options']['rows']):,} rows", "rows/s", "seconds", "peak memory, MB", "file, MB")
    return "\n\n".join([report.table(heads, rows), report.claims_table(run["claims"])])


if __name__ == "__main__":
    sys.exit(main())
