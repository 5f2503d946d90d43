"""What of a decision does not change from request to request, compiled once: the program that the script is handed."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ratelimits.engine import scripts
from ratelimits.engine.keys import name_id
from ratelimits.engine.limits import Algorithm, CalendarWindow, FixedWindow, Gcra, LeakyBucket, Mode, TokenBucket

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
    _held: tuple[int, int, tuple[bytes, bytes]] | None = field(default=None, init=False, compare=False, repr=False)

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
        packed = self._packed_keys
        own = [(term.key, term.name) for term in self.terms if term.algorithm.id in _BESIDE | _INSTEAD]
        return *((key, None) for key in packed), *own

    @cached_property
    def _packed_keys(self) -> list[int]:
        return sorted({term.key for term in self.terms if term.algorithm.id not in _INSTEAD})

    @cached_property
    def packed_states(self) -> int:
        """How many of `places` are packed states: they come first."""
        return len(self._packed_keys)

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
    def formats(self) -> tuple[bytes, ...] | None:
        """The formats of the packed states as fast.lua reads them, and that of its own program; None: not for it."""
        if not self.terms or not all(_usual(term) for term in self.terms):
            return None
        states = ["<I4" + "".join(_format(term) for term in self.terms if term.key == key) for key in self._packed_keys]
        return *(state.encode() for state in states), b"<" + b"d" * len(self._numbers(0))

    def _numbers(self, now: int) -> list[float]:
        """What fast.lua reads: state by state the number of limits, the bytes of their records, and each limit."""
        out: list[float] = []
        for key in self._packed_keys:
            here = [(number, term) for number, term in enumerate(self.terms, 1) if term.key == key]
            out += [len(here), 4 + sum(_HEAD + _SIZES[_format(term)] for _number, term in here)]
            for number, term in here:
                p = term.algorithm.params(now)
                out += [number, name_id(term.name), term.algorithm.code, term.slot + 1]
                if isinstance(term.algorithm, FixedWindow):
                    out += [p[0], 0, p[5]]
                elif isinstance(term.algorithm, CalendarWindow):
                    out += [p[1], p[2], p[5]]
                elif p[2] == 1:
                    out += [p[0], p[3]]
                else:
                    out += [p[0], p[2], p[1], p[3], p[4]]
        return out

    def _compile(self, now: int) -> tuple[bytes, bytes]:
        if self.formats is None:
            return self._pack(now), b""
        numbers = self._numbers(now)
        return self._pack(now), struct.pack(f"<{len(numbers)}d", *numbers)

    @cached_property
    def _calendars(self) -> tuple[CalendarWindow, ...]:
        return tuple(term.algorithm for term in self.terms if isinstance(term.algorithm, CalendarWindow))

    @cached_property
    def _fixed(self) -> tuple[bytes, bytes] | None:
        return None if self._calendars else self._compile(0)

    def packed(self, now: int | None = None) -> tuple[bytes, bytes]:
        """The terms as decide.lua reads them, and as fast.lua does.

        `now` (µs since 1970 UTC; this machine's) places the calendars.
        """
        fixed = self._fixed
        if fixed is not None:
            return fixed
        moment = time.time_ns() // 1000 if now is None else now
        held = self._held
        if held is None or not held[0] <= moment < held[1]:
            periods = [calendar.params(moment) for calendar in self._calendars]
            start, end = max(period[1] for period in periods), min(period[2] for period in periods)
            held = start, end, self._compile(moment)
            # Not part of what a program is: what it was last compiled to.
            object.__setattr__(self, "_held", held)
        return held[2]


#: Formats of the records in a packed state, as lua/prelude.lua has them: behind a head of 11 bytes, with their sizes.
_HEAD = 11
_LEVEL, _FRACTION, _WINDOW = "I4BI2I4I7I7I7", "I4BI2I4I7I7I4I4I7I4", "I4BI2I4i7i7I7I6"
_SIZES = {_LEVEL: 21, _FRACTION: 33, _WINDOW: 27}


def _format(term: Term) -> str:
    if isinstance(term.algorithm, (FixedWindow, CalendarWindow)):
        return _WINDOW
    return _LEVEL if term.algorithm.params(0)[2] == 1 else _FRACTION


def _usual(term: Term) -> bool:
    """Whether fast.lua knows the term: a bucket that starts full, or a window that does not start with a hit."""
    algorithm = term.algorithm
    if term.mode is not Mode.ENFORCE:
        return False
    if isinstance(algorithm, (CalendarWindow, FixedWindow)):
        return isinstance(algorithm, CalendarWindow) or algorithm.window_start == "epoch"
    if isinstance(algorithm, (TokenBucket, Gcra, LeakyBucket)):
        params = algorithm.params(0)
        return params[6] == 0 and params[2] < 2**32
    return False


@lru_cache(maxsize=4096)
def program(terms: tuple[Term, ...]) -> Program:
    """The program of these terms, compiled once."""
    return Program(terms)
