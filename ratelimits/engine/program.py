"""Compile limits to a program: bytes for the deciding script (lua/decide.lua). Many requests use the same program.

The file lua/fast.lua decides the most frequent requests in a quicker way. It gets the limits in another form.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from ratelimits.algorithms.base import Algorithm, FastPath
from ratelimits.algorithms.limits import Lasting, Mode
from ratelimits.engine import scripts
from ratelimits.engine.keys import name_id, own_name

#: The format of one limit in a program. lua/decide.lua lists the fields at ARGV[4].
_RECORD = struct.Struct("<IIIBBBBBdddddddddd")
#: Size in bytes of the header of each record in a packed state (see lua/prelude.lua). The algorithm's bytes follow.
_HEAD_SIZE = 11
#: Maximum number of limits in one decision. The script has one byte for the number of a state, and engine.decision
#: prepares one function for each length of a reply.
MAX_LIMITS = 120


@dataclass(frozen=True, slots=True)
class Term:
    """A limit in a program. It has no key and no cost, because these come with the request.

    key       position of the limited key in the call's `keys`
    slot      position of the cost in the call's `costs`
    rule      id of the rule; 0 if the limit does not come from a rule
    version   version of the rule
    since     moment from which the limit's parameters hold, in µs since 1970 UTC; 0: the moment of the decision
    max_wait  longest wait in µs; -1: the request's timeout
    lasting   when the state is restored before it is used
    """

    algorithm: Algorithm
    name: str
    key: int
    slot: int
    mode: Mode = Mode.ENFORCE
    rule: int = 0
    version: int = 0
    since: int = 0
    max_wait: int = -1
    lasting: Lasting = Lasting.NO


class StateKey(NamedTuple):
    """A Redis key in which the states of limits are stored.

    key      position of the limited key in the call's `keys`
    own      if the Redis key belongs to one limit alone: the part of its name that stands for the limit; otherwise None
    endings  suffixes of the limit's further Redis keys
    """

    key: int
    own: str | None = None
    endings: tuple[str, ...] = ()


class Packed(NamedTuple):
    """A program as bytes, valid from `start` until `end` (µs since 1970 UTC).

    program  the terms in the form for decide.lua
    fast     the terms in the form for fast.lua: numbers as bytes, their struct format, the format of each packed state,
             and the format of the reply. Empty if fast.lua cannot decide these terms
    """

    program: bytes
    fast: tuple[bytes, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Program:
    """Terms that are decided together: at most MAX_LIMITS. Two terms with the same key must have different names."""

    terms: tuple[Term, ...]
    _current: Packed | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.terms) > MAX_LIMITS:
            raise ValueError(f"a decision takes at most {MAX_LIMITS} limits, not {len(self.terms)}")
        names: dict[tuple[int, int], str] = {}
        for term in self.terms:
            other = names.setdefault((term.key, name_id(term.name)), term.name)
            if other != term.name or sum(t.key == term.key and t.name == term.name for t in self.terms) > 1:
                raise ValueError(f"two limits of one key are named {term.name!r} and {other!r}: rename one")

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle only the terms, so that a stored receipt does not contain the script.
        return program, (self.terms,)

    @cached_property
    def script(self) -> scripts.Script:
        """Return the deciding script with only the algorithms of this program."""
        return scripts.deciding(frozenset(type(term.algorithm) for term in self.terms))

    @cached_property
    def states(self) -> tuple[StateKey, ...]:
        """Return the Redis keys of the states in the order of the script's KEYS. Packed states come first."""
        own_keys = [
            StateKey(term.key, _own(term), tuple(term.algorithm.storage.endings.values()))
            for term in self.terms
            if _own(term)
        ]
        return *(StateKey(key) for key in self._packed_keys), *own_keys

    @cached_property
    def lasts(self) -> bool:
        """Return whether a term is restored if Redis has lost its state."""
        return any(term.lasting for term in self.terms)

    @cached_property
    def _packed_keys(self) -> list[int]:
        return sorted({term.key for term in self.terms if term.algorithm.storage.packed})

    @cached_property
    def packed_states(self) -> int:
        """Return the number of packed states in `states`."""
        return len(self._packed_keys)

    def _pack(self, now: int) -> bytes:
        state_numbers = {(state.key, state.own): number for number, state in enumerate(self.states, 1)}
        records = []
        for term in self.terms:
            params = term.algorithm.params(now)
            own_key = state_numbers[term.key, _own(term)] if _own(term) else 0
            state = state_numbers[term.key, None] if term.algorithm.storage.packed else own_key
            mode = term.mode + 2 * term.lasting
            head = name_id(term.name), term.rule, term.version, term.algorithm.code, mode, state, own_key
            records.append(
                _RECORD.pack(*head, term.slot + 1, *params, *(0,) * (8 - len(params)), term.since, term.max_wait)
            )
        return b"".join(records)

    @cached_property
    def _has_fast_path(self) -> bool:
        """Return whether fast.lua can decide all terms."""
        return bool(self.terms) and all(_fast_path(term, 0) for term in self.terms)

    @cached_property
    def fast_parts(self) -> int:
        """Return the number of arguments that only fast.lua reads; 0 if fast.lua cannot decide all terms.

        The first of these arguments follows the program. The others are the last arguments of the command.
        """
        return len(self._packed_keys) + 3 if self._has_fast_path else 0

    def _pack_fast(self, now: int) -> tuple[bytes, ...]:
        numbers: list[float] = []
        formats = []
        for key in self._packed_keys:
            terms = [(number, term) for number, term in enumerate(self.terms, 1) if term.key == key]
            paths = [path for path in (_fast_path(term, now) for _number, term in terms) if path is not None]
            formats.append("<I4" + "".join(f"I4BI2I4{path.format}" for path in paths))
            numbers += len(terms), 4 + sum(_HEAD_SIZE + path.size for path in paths)
            for (number, term), path in zip(terms, paths, strict=True):
                numbers += name_id(term.name), term.algorithm.code, path.size, number, term.slot + 1, *path.numbers
        formats = [f"<{'d' * len(numbers)}", *formats, "<" + "i8" * (9 + 3 * len(self.terms))]
        return struct.pack(formats[0], *numbers), *(text.encode() for text in formats)

    def _compile(self, now: int) -> tuple[bytes, tuple[bytes, ...]]:
        return self._pack(now), self._pack_fast(now) if self._has_fast_path else ()

    @cached_property
    def _fixed(self) -> Packed | None:
        """Return the terms as bytes if the same bytes are valid at every moment; otherwise None."""
        varies = any(term.algorithm.valid_span(0) is not None for term in self.terms)
        return None if varies else Packed(*self._compile(0), float("-inf"), float("inf"))

    def packed(self, now: int) -> Packed:
        """Return the terms as bytes for the script. The bytes are valid at `now` (µs since 1970 UTC)."""
        fixed = self._fixed
        if fixed is not None:
            return fixed
        current = self._current
        if current is None or not current.start <= now < current.end:
            spans = [span for span in (term.algorithm.valid_span(now) for term in self.terms) if span is not None]
            start, end = max(start for start, _end in spans), min(end for _start, end in spans)
            current = Packed(*self._compile(now), start, end)
            # The dataclass is frozen. This attribute is only a cache.
            object.__setattr__(self, "_current", current)
        return current


def _own(term: Term) -> str | None:
    """Return the part of an own key's name that stands for the limit; None if the limit has no own key."""
    letter = term.algorithm.storage.own
    return own_name(letter, term.name) if letter else None


def _fast_path(term: Term, now: int) -> FastPath | None:
    """Return a term in the form for fast.lua; None if fast.lua cannot decide the term."""
    return term.algorithm.fast_path(term.algorithm.params(now)) if term.mode is Mode.ENFORCE else None


@lru_cache(maxsize=4096)
def program(terms: tuple[Term, ...]) -> Program:
    """Return the program of these terms. It is cached."""
    return Program(terms)
