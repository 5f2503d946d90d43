"""Samples of the memory, the connections and the speed of a soak, and the table that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import psutil


class Sample(NamedTuple):
    """What was measured at one moment; `seconds` is the time since the load began.

    The speed and the p99 are of the time since the sample before.
    """

    seconds: float
    web_mb: float
    worker_mb: float
    redis_connections: float
    database_connections: float
    p99_ms: float
    per_second: float


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process and all its descendants, in MB (10⁶ bytes)."""
    process = psutil.Process(pid)
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


#: The rows of the table: the text, the field, and how it is written.
_ROWS: tuple[tuple[str, Callable[[Sample], float], str], ...] = (
    ("resident memory of the web server, MB", lambda one: one.web_mb, ",.1f"),
    ("resident memory of the worker and beat, MB", lambda one: one.worker_mb, ",.1f"),
    ("connections to Redis", lambda one: one.redis_connections, ",.0f"),
    ("connections to the database", lambda one: one.database_connections, ",.0f"),
    ("p99 of a request, ms", lambda one: one.p99_ms, ",.1f"),
    ("requests/s", lambda one: one.per_second, ",.0f"),
)


class Series:
    """All samples of a soak. `reference` is the moment with which its end is compared, in seconds."""

    #: The figures at a moment are means of the samples of this time around it, in seconds.
    AROUND = 60.0

    def __init__(self, reference: float) -> None:
        self.reference = reference
        self.samples: list[Sample] = []

    def _around(self, value: Callable[[Sample], float], moment: float) -> float:
        near = [one for one in self.samples if abs(one.seconds - moment) <= self.AROUND / 2] or self.samples[-1:]
        return fmean(value(one) for one in near)

    def figures(self, value: Callable[[Sample], float]) -> tuple[float, float, float]:
        """Return a figure at the start, at the reference and at the end."""
        end = self.samples[-1].seconds - self.AROUND / 2
        return value(self.samples[0]), self._around(value, self.reference), self._around(value, end)

    def ratio(self, value: Callable[[Sample], float]) -> float:
        """Return a figure at the end as a multiple of the figure at the reference."""
        _start, reference, end = self.figures(value)
        return end / reference if reference else 1.0

    def cells(self) -> list[Sequence[str]]:
        """Return the lines of the table."""
        return [
            (name, *(format(figure, form) for figure in self.figures(value)), f"{self.ratio(value):.3f}")
            for name, value, form in _ROWS
        ]

    def heads(self) -> Sequence[str]:
        """Return the heads of the table."""
        reference = f"minute {self.reference / 60:.2g}"
        return ("", "start", reference, "end", f"end ÷ {reference}")


def broken_promises(series: Series, counts: dict[str, Any]) -> list[str]:
    """Return a sentence for each promise that did not hold."""
    out = []
    for name, value in (("web server", lambda one: one.web_mb), ("worker", lambda one: one.worker_mb)):
        if not 0.97 <= series.ratio(value) <= 1.03:
            out.append(f"the memory of the {name} changed by more than 3 %")
    for name, value in (
        ("Redis", lambda one: one.redis_connections),
        ("the database", lambda one: one.database_connections),
    ):
        if series.ratio(value) > 1.1:
            out.append(f"the number of connections to {name} grew by more than a tenth")
    if series.ratio(lambda one: one.p99_ms) > 1.25:
        out.append("the p99 of a request grew by more than a quarter")
    out += [f"{counts[name]} {name}" for name in ("errors", "units lost", "units too many") if counts[name]]
    return out
