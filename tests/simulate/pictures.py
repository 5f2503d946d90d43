"""Draw the pictures of docs/algorithms.md: the same thirty seconds of bursts under a rule of each algorithm.

    python -m tests.simulate.pictures [FOLDER]

prints the pictures, on an embedded server, or draws them into the files of a folder: one of all rules, and one of each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate import sandbox
from ratelimits.simulate.summary import spark
from tests.support.engine.replaying import opening

SLOT = Decimal("0.5")
SLOTS = 60
PATIENCE = 2
"""Seconds that a request waits at most where the algorithm lets it."""
RULES: dict[str, dict[str, Any]] = {
    "fixed_window": {"capacity": 10, "period": 2},
    "fixed_window, first_hit": {"capacity": 10, "period": 2, "window_start": "first_hit"},
    "sliding_window": {"capacity": 10, "period": 2, "sub_windows": 4},
    "sliding_window, weighted": {"capacity": 10, "period": 2, "sub_windows": 1, "weighted": True},
    "sliding_log": {"capacity": 10, "period": 2},
    "token_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "gcra": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket_queue": {"capacity": 10, "rate": 5, "period": 1},
    "smooth_bursty": {"rate": 5, "period": 1, "max_burst_seconds": 2},
    "smooth_warming_up": {"rate": 5, "period": 1, "warm_up": 4, "cold_factor": 3},
    "concurrency": {"capacity": 10, "lease_ttl": 2},
}
LEFT, RIGHT, ROW, BAR, MOST = 200, 800, 48, 10, 20
STYLE = (
    "text{font:13px ui-monospace,monospace;fill:#1f2328}.tick{font-size:11px;text-anchor:middle;fill:#656d76}"
    ".asked{fill:#d0d7de}.admitted{fill:#0969da}.axis{stroke:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.tick{fill:#8d96a0}.asked{fill:#30363d}"
    ".admitted{fill:#4493f8}.axis{stroke:#30363d}}"
)
PATIENT = ("leaky_bucket_queue", "smooth_bursty", "smooth_warming_up")


def asked() -> Iterator[Decimal]:
    """Yield the times: two bursts of forty in a second, six seconds of eight a second, five of four a second."""
    for start, count, every in (("1.5", 40, "0.025"), (8, 48, "0.125"), ("19.5", 40, "0.025"), (25, 20, "0.25")):
        for number in range(count):
            yield Decimal(start) + number * Decimal(every)


def admitted(wire: Wire) -> Iterator[tuple[str, list[int], int]]:
    """Yield for each rule how many requests proceed in each half second, and in all."""
    with opening(wire) as open_replay:
        for name, fields in RULES.items():
            algorithm = name.split(",")[0]
            timeout = PATIENCE if algorithm in PATIENT else 0
            replay = open_replay({"algorithm": algorithm, **fields})
            lines = [{"at": at, "timeout": timeout} for at in asked()]
            answers = [answer for answer in replay.run(lines) if answer["allowed"]]
            yield name, slots(answer["at"] + Decimal(repr(answer["wait"])) for answer in answers), len(answers)


def pictures(wire: Wire) -> Iterator[str]:
    """Yield a line for the requests, then one for those that proceed under each algorithm, by half seconds."""
    width = max(map(len, RULES))
    yield f"{'asked':{width}} {spark(slots(asked()), 20)} {len(list(asked()))}"
    for name, counts, total in admitted(wire):
        yield f"{name:{width}} {spark(counts, 10)} {total}"


def chart(wire: Wire) -> Iterator[str]:
    """Yield the same as SVG: a row for each rule, with what proceeds in front of what was asked; a full bar is MOST."""
    yield from _drawn(list(admitted(wire)))


def charts(wire: Wire) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each rule in a file name, and its row as a picture of its own."""
    for row in admitted(wire):
        yield re.sub(r"\W+", "-", row[0]), list(_drawn([row]))


def _drawn(rows: Sequence[tuple[str, list[int], int]]) -> Iterator[str]:
    height = ROW * len(rows) + 24
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {RIGHT + 60} {height}" role="img">'
    yield f"<title>What is asked in {SLOTS // 2} seconds, and what proceeds under each algorithm</title>"
    yield f"<style>{STYLE}</style>"
    for row, (name, counts, total) in enumerate(rows):
        floor = ROW * (row + 1) - 4
        yield f'<text x="0" y="{floor - 6}">{name}</text><text x="{RIGHT + 8}" y="{floor - 6}">{total}</text>'
        yield f'<path class="asked" d="{bars(slots(asked()), floor)}"/>'
        yield f'<path class="admitted" d="{bars(counts, floor)}"/>'
        yield f'<path class="axis" d="M{LEFT} {floor}H{RIGHT}"/>'
    for second in range(0, SLOTS // 2 + 1, 5):
        yield f'<text class="tick" x="{LEFT + 2 * second * BAR}" y="{height - 6}">{second} s</text>'
    yield "</svg>"


def bars(counts: list[int], floor: int) -> str:
    return "".join(
        f"M{LEFT + number * BAR} {floor}v{-round(count * (ROW - 8) / MOST, 2):g}h{BAR - 2}V{floor}z"
        for number, count in enumerate(counts)
        if count
    )


def slots(moments: Iterator[Decimal]) -> list[int]:
    counts = [0] * SLOTS
    for at in moments:
        if at < SLOT * SLOTS:
            counts[int(at / SLOT)] += 1
    return counts


if __name__ == "__main__":
    from django.conf import settings

    settings.configure()
    with sandbox() as wire:
        if sys.argv[1:]:
            folder = Path(sys.argv[1])
            (folder / "algorithms").mkdir(exist_ok=True)
            (folder / "algorithms.svg").write_text("\n".join(chart(wire)) + "\n")
            for name, lines in charts(wire):
                (folder / "algorithms" / f"{name}.svg").write_text("\n".join(lines) + "\n")
        else:
            print("\n".join(pictures(wire)))
