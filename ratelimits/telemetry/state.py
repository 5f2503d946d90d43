"""Metrics that do not come from decisions: who knows such a number adds a function that reads it to `sources`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: Seconds for which the readings are cached, so that frequent scrapes do not load the database.
CACHE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One number: the name of its metric, what it means, its labels, and its value."""

    name: str
    meaning: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


#: The functions that read the numbers. They raise nothing: a number that cannot be read is missing.
sources: list[Callable[[], Iterable[Reading]]] = []
#: The moment until which the cached readings are used (by `time.monotonic`), and these readings.
_cached: tuple[float, list[Reading]] = (0.0, [])


def readings() -> list[Reading]:
    """Return all numbers that can be read."""
    global _cached
    until, found = _cached
    now = time.monotonic()
    if now >= until:
        found = [reading for source in sources for reading in source()]
        _cached = now + CACHE_SECONDS, found
    return found


def forget() -> None:
    """Empty the cache, so that the next call of `readings` reads everything again."""
    global _cached
    _cached = 0.0, []
