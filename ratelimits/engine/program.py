"""What of a decision does not change from request to request, compiled once: the program that the script is handed."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ratelimits.engine import scripts
from ratelimits.engine.keys import name_id
from ratelimits.engine.limits import Algorithm, CalendarWindow, Mode

_RECORD = struct.Struct("<IIIBBBBBdddddddddd")
#: Algorithms whose state has a key of its own, beside the packed one or instead of it.
_BESIDE = {"sliding_log", "concurrency"}
_INSTEAD = {"sliding_window"}


@dataclass(frozen=True, slots=True)
class Term:
    """A limit without its key and cost: those are the `key`-th and `slot`-th that the request brings along."""

    algorithm: Algorithm
    name: str
    key: int
    slot: int
    mode: Mode = Mode.ENFORCE
    rule: int = 0
    version: int = 0
    since: int = 0
    #: Longest wait in µs; -1: the request's timeout.
    max_wait: int = -1


@dataclass(frozen=True)
class Program:
    """Terms that are decided together. At most 255 of them; two under one key must differ in name."""

    terms: tuple[Term, ...]
    _calendar: dict[str, tuple[int, int, bytes]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.terms) > 120:
            raise ValueError("a decision takes at most 120 limits")
        taken: dict[tuple[int, int], str] = {}
        for term in self.terms:
            other = taken.setdefault((term.key, name_id(term.name)), term.name)
            if other != term.name or sum(t.key == term.key and t.name == term.name for t in self.terms) > 1:
                raise ValueError(f"two limits of one key are named {term.name!r} and {other!r}: rename one")

    @cached_property
    def script(self) -> scripts.Script:
        """The script that knows this program's algorithms, and no others."""
        return scripts.deciding(frozenset(term.algorithm.script for term in self.terms))

    @cached_property
    def places(self) -> tuple[tuple[int, str | None], ...]:
        """The states' keys, in the order of the script's KEYS: a key's number, and a limit's name for its own."""
        packed = sorted({term.key for term in self.terms if term.algorithm.id not in _INSTEAD})
        own = [(term.key, term.name) for term in self.terms if term.algorithm.id in _BESIDE | _INSTEAD]
        return *((key, None) for key in packed), *own

    def _pack(self, now: int) -> bytes:
        places = {place: number for number, place in enumerate(self.places, 1)}
        out = []
        for term in self.terms:
            params = term.algorithm.params(now)
            own = places.get((term.key, term.name), 0)
            state = own if term.algorithm.id in _INSTEAD else places[term.key, None]
            head = name_id(term.name), term.rule, term.version, term.algorithm.code, term.mode, state, own
            out.append(
                _RECORD.pack(*head, term.slot + 1, *params, *(0,) * (8 - len(params)), term.since, term.max_wait)
            )
        return b"".join(out)

    @cached_property
    def _fixed(self) -> bytes | None:
        return None if any(isinstance(term.algorithm, CalendarWindow) for term in self.terms) else self._pack(0)

    def packed(self, now: int | None = None) -> bytes:
        """The terms as the script reads them; `now` (µs since 1970 UTC; this machine's) places the calendars."""
        fixed = self._fixed
        if fixed is not None:
            return fixed
        moment = time.time_ns() // 1000 if now is None else now
        held = self._calendar.get("held")
        if held is None or not held[0] <= moment < held[1]:
            ends = [term.algorithm.params(moment) for term in self.terms if isinstance(term.algorithm, CalendarWindow)]
            held = max(end[1] for end in ends), min(end[2] for end in ends), self._pack(moment)
            self._calendar["held"] = held
        return held[2]


@lru_cache(maxsize=4096)
def program(terms: tuple[Term, ...]) -> Program:
    """The program of these terms, compiled once."""
    return Program(terms)
