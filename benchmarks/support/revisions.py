"""Compare this checkout with an earlier revision: run a benchmark of both, in turns, on the same machine.

    python -m benchmarks.support.revisions REVISION [--benchmark decide] [--turns 5] [--options "--rounds 20"]

Both revisions use the packages that are installed here. Each turn runs both revisions, and their order changes from
turn to turn. A time is reported as slower only if it was slower in every turn, because other work on the machine may
change a single turn.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support import report

ROOT = Path(__file__).resolve().parents[2]
#: How many µs a figure of a run's JSON means, by the end of its name. A rate becomes the time of one.
MICROSECONDS: dict[str, Callable[[float], float]] = {
    "_us": lambda time: time,
    "seconds": lambda time: 1e6 * time,
    "per_second": lambda rate: 1e6 / rate,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support.revisions", description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--benchmark", default="decide", help="a benchmark whose JSON has times or rates")
    parser.add_argument("--turns", type=int, default=5, help="how often each revision runs")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    parser.add_argument("--options", default="", help="options of the benchmark, in quotes")
    chosen = parser.parse_args(argv)
    with TemporaryDirectory(prefix="ratelimits-revision-") as directory:
        earlier = Path(directory) / "earlier"
        unpack(chosen.revision, earlier)
        turns = []
        for turn in range(chosen.turns):
            pair = [("before", earlier), ("after", ROOT)]
            measured = {}
            for which, root in pair if turn % 2 else reversed(pair):
                out = Path(directory) / f"{which}-{turn}"
                measured[which] = run(chosen.benchmark, root, shlex.split(chosen.options), out)
            turns.append(measured)
    lines = compare(turns)
    if not lines:
        parser.error(f"no time and no rate of {chosen.benchmark} is in the JSON of both revisions")
    heads = ("what", "before µs", "after µs", "ratio", "least", "greatest", "slower in every turn")
    print(report.table(heads, [tuple(line.values()) for line in lines]))
    if chosen.out is not None:
        result = {"benchmark": "revisions", "revision": chosen.revision, "of": chosen.benchmark, "lines": lines}
        report.write({**result, "turns": chosen.turns}, chosen.out)
    return 0


def unpack(revision: str, to: Path) -> None:
    """Write the files of a revision into a directory. Raise CalledProcessError for an unknown revision."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(to, filter="data")


def run(benchmark: str, root: Path, options: Sequence[str], out: Path) -> dict[str, float]:
    """Run a benchmark of a checkout. Return its times in µs, by name."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *options, "--out", str(out)]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    measured = json.loads((out / f"{benchmark}.json").read_text())
    return dict(times("", {key: value for key, value in measured.items() if key != "options"}))


def times(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield each time and rate in a run's JSON, in µs.

    The name of each is `name` and the keys of the JSON objects around it. Where there is a median, it
    stands for the other times beside it, and is named only by what it is of.
    """
    if not isinstance(value, dict):
        return
    if "median_us" in value:
        yield name, float(value["median_us"])
    for key, inner in value.items():
        inner_name = f"{name} {key}".strip()
        unit = next((unit for end, unit in MICROSECONDS.items() if key.endswith(end)), None)
        if isinstance(inner, dict):
            yield from times(inner_name, inner)
        elif unit is not None and "median_us" not in value and isinstance(inner, int | float) and inner > 0:
            yield inner_name, unit(inner)


def compare(turns: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a line for each time that both revisions have: its medians over the turns, and ratios (after / before)."""
    runs = [measured for turn in turns for measured in turn.values()]
    lines = []
    for name in (name for name in runs[0] if all(name in measured for measured in runs)):
        ratios = [turn["after"][name] / turn["before"][name] for turn in turns]
        lines.append(
            {
                "what": name,
                "before": median(turn["before"][name] for turn in turns),
                "after": median(turn["after"][name] for turn in turns),
                "ratio": median(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
                "slower": "slower" if min(ratios) > 1 else "",
            }
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
