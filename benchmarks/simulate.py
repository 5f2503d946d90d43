"""Measure how long `manage.py ratelimits_simulate` takes for 100,000 lines. This time includes the command's start.

    python -m benchmarks.simulate [--lines 100000] [--out DIR]

The trace is one day of a thousand keys, made from a fixed seed. The command and its embedded server use all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import report, servers

ROOT = Path(__file__).resolve().parent.parent
BUCKET = {"algorithm": "token_bucket", "capacity": 20, "rate": 1, "period": 5}
RULES: dict[str, Any] = {
    "token_bucket": BUCKET,
    "calendar_window": {
        "algorithm": "calendar_window",
        "capacity": 100,
        "calendar_unit": "day",
        "timezone": "Europe/Berlin",
    },
    "sliding_log": {"algorithm": "sliding_log", "capacity": 50, "period": 3600},
    "smooth_warming_up": {"algorithm": "smooth_warming_up", "rate": 0.9, "period": 60, "warm_up": 600},
    "three rules": [
        BUCKET,
        {"algorithm": "fixed_window", "capacity": 30, "period": 3600},
        {"algorithm": "calendar_window", "capacity": 1000, "calendar_unit": "month"},
    ],
}


def chosen(only: str | None) -> list[str]:
    """Return the names of the rules to measure: all, or "token_bucket" and the names that contain the text `only`."""
    return [name for name in RULES if only is None or only in name or name == "token_bucket"]


def trace(lines: int) -> str:
    """Return the lines of the trace as JSON, each with a moment and a key."""
    draw = random.Random(1)
    # One day, in seconds since 1970 UTC. A few of the thousand keys make most of the requests.
    moments = sorted(draw.uniform(1_431_857_100, 1_431_943_500) for _ in range(lines))
    return "".join(f'{{"at": {at:.6f}, "key": "user:{int(draw.paretovariate(0.5)) % 1000}"}}\n' for at in moments)


def durations(rule: Any, trace_file: Path) -> tuple[float, float]:
    """Return the duration of the command, and the processor time of the command and its server, both in seconds."""
    rule_file = trace_file.with_name("rule.json")
    rule_file.write_text(json.dumps(rule))
    command = [sys.executable, "manage.py", "ratelimits_simulate", "--rule", str(rule_file), "--trace", str(trace_file)]
    # Without REDIS_URL, the command starts its embedded server.
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    took, after = time.perf_counter() - began, os.times()
    return took, after.children_user + after.children_system - before.children_user - before.children_system


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000, help="lines of the trace")
    parser.add_argument("--only", help="only the rules whose names contain this text, and the token bucket")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    with servers.redis_server(servers.cores()[0]) as server:
        machine_info = report.machine(server.url)
    took: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        trace_file = Path(directory) / "trace.jsonl"
        trace_file.write_text(trace(options.lines))
        for name in chosen(options.only):
            elapsed, processor = durations(RULES[name], trace_file)
            took[name] = {"seconds": round(elapsed, 2), "processor_seconds": round(processor, 2)}
            print(f"{name:20} {elapsed:6.1f} s, processor time {processor:6.1f} s", flush=True)
    promised = report.Claim("simulating 100,000 lines with one rule, s", 10, took["token_bucket"]["seconds"])
    report.write(report.run_json("simulate", machine_info, vars(options), [promised], took=took), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
