"""Compile limits to a program: bytes for the deciding script (lua/decide.lua). Many requests use the same program."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from ratelimits.algorithms.base import Algorithm
from ratelimits.algorithms.limits import Lasting, Mode
from ratelimits.engine.assemble import LimitShape
from ratelimits.engine.assemble.algorithm_files import algorithm_file, params_of
from ratelimits.engine.keys import name_id, own_name

#: What a program says at its end about each limit: the moment from which the limit's params hold, and the text
#: "rule|version". The rule and the version are sent as text, because Lua needs much time to convert numbers to text.
#: A zero byte follows, so that Lua can read the text as a string of C.
_RULE = struct.Struct("<d21sx")
#: The id of a rule, and the version of a rule, are below this number, so that the text has at most 21 characters.
_MAX_RULE = 2**32
#: The header that a limit's record usually has: name, code of the algorithm, size. lua/records.lua describes records.
_HEADER = struct.Struct("<IBH")
#: Maximum number of limits in one decision. There is a maximum because a general script reads the slot of a cost from
#: one byte (engine/assemble/general.py), and engine.decision prepares one function for each length of a reply.
MAX_LIMITS = 120


@dataclass(frozen=True, slots=True)
class Term:
    """A limit in a program.

    Many calls share a program. So the key and the cost are in the call, and a term has only their positions.

    key       position of the limited key in the call's `keys`, from 0
    slot      position of the cost in the call's `costs`, from 0
    rule      id of the rule; 0 if the limit does not come from a rule
    version   version of the rule
    since     moment from which the limit's parameters hold, in µs since 1970 UTC; 0 means the moment of the decision
    max_wait  longest wait in µs; -1 means that the call's `timeout` is used
    lasting   in which cases the state is restored from the ledger before it is used
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
    own      None for a packed state, with the states of several limits. If the Redis key belongs to one limit alone:
             the part of its name that stands for the limit
    endings  suffixes of further Redis keys that belong only to this limit
    """

    key: int
    own: str | None = None
    endings: tuple[str, ...] = ()


class Packed(NamedTuple):
    """A program as bytes, valid from `start` until `end` (µs since 1970 UTC)."""

    program: bytes
    start: float
    end: float


@dataclass(frozen=True)
class Program:
    """Terms that are decided together: at most MAX_LIMITS. Two terms with the same key must have different names.

    The numbers that stand for the names in Redis (`name_id`) must differ too.
    """

    terms: tuple[Term, ...]
    _current: Packed | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.terms) > MAX_LIMITS:
            raise ValueError(f"a decision takes at most {MAX_LIMITS} limits, not {len(self.terms)}")
        names: dict[tuple[int, int], str] = {}
        for term in self.terms:
            first = names.setdefault((term.key, name_id(term.name)), term.name)
            if first != term.name:
                raise ValueError(
                    f"the names {first!r} and {term.name!r} of two limits of one key have the same CRC-32: rename one"
                )
            if sum(t.key == term.key and t.name == term.name for t in self.terms) > 1:
                raise ValueError(f"two limits of one key are named {term.name!r}: rename one")

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle only the terms, so that a stored receipt does not contain the script.
        return program, (self.terms,)

    @cached_property
    def limit_shapes(self) -> tuple[LimitShape, ...]:
        """Return what a script knows about the limits.

        `state_key` and `own_key` are positions in `states`, from 1. engine/command.py finds the positions in KEYS.
        """
        positions = {(state.key, state.own): position for position, state in enumerate(self.states, 1)}
        shapes = []
        for term in self.terms:
            algorithm = term.algorithm
            own_key = positions[term.key, _own(term)] if _own(term) else 0
            shapes.append(
                LimitShape(
                    algorithm=type(algorithm),
                    form=algorithm.record_form(algorithm.params(0)),
                    shadow=term.mode is Mode.SHADOW,
                    slot=term.slot + 1,
                    state_key=positions[term.key, None] if algorithm.storage.packed else own_key,
                    own_key=own_key,
                    waits=term.max_wait >= 0,
                    lasting=int(term.lasting),
                )
            )
        return tuple(shapes)

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
        """Return whether at least one term is restored from the ledger if Redis has lost its state."""
        return any(term.lasting for term in self.terms)

    @cached_property
    def _packed_keys(self) -> list[int]:
        return sorted({term.key for term in self.terms if term.algorithm.storage.packed})

    @cached_property
    def packed_states(self) -> int:
        """Return how many of the `states` are packed states."""
        return len(self._packed_keys)

    def _pack(self, now: int) -> bytes:
        limits, rules = [], []
        for term, shape in zip(self.terms, self.limit_shapes, strict=True):
            kind = type(term.algorithm)
            size = algorithm_file(kind).form(shape.form).size if shape.form else 0
            header = _HEADER.pack(name_id(term.name), kind.code, size)
            params = params_of(kind, term.algorithm.params(now))
            waits = (term.max_wait,) if term.max_wait >= 0 else ()
            limits.append(header + struct.pack(f"<{len(waits) + len(params)}d", *waits, *params))
            if not (0 <= term.rule < _MAX_RULE and 0 <= term.version < _MAX_RULE):
                raise ValueError(
                    f"the id and version of a rule are from 0 to 2**32 - 1, not {term.rule}, {term.version}"
                )
            rules.append(_RULE.pack(term.since, b"%d|%d" % (term.rule, term.version)))
        return b"".join([*limits, *rules])

    @cached_property
    def _fixed(self) -> Packed | None:
        """Return the terms as bytes if the same bytes are valid at every moment; otherwise None."""
        varies = any(term.algorithm.valid_span(0) is not None for term in self.terms)
        return None if varies else Packed(self._pack(0), float("-inf"), float("inf"))

    def packed(self, now: int) -> Packed:
        """Return the terms as bytes for the script. The bytes are valid at `now` (µs since 1970 UTC)."""
        fixed = self._fixed
        if fixed is not None:
            return fixed
        current = self._current
        if current is None or not current.start <= now < current.end:
            spans = [span for span in (term.algorithm.valid_span(now) for term in self.terms) if span is not None]
            start, end = max(start for start, _end in spans), min(end for _start, end in spans)
            current = Packed(self._pack(now), start, end)
            # The dataclass is frozen, so an assignment would fail. But this attribute is only a cache.
            object.__setattr__(self, "_current", current)
        return current


def _own(term: Term) -> str | None:
    """Return the part of an own key's name that stands for the limit; None if the limit has no own key."""
    letter = term.algorithm.storage.own
    return own_name(letter, term.name) if letter else None


@lru_cache(maxsize=4096)
def program(terms: tuple[Term, ...]) -> Program:
    """Return the program of these terms. It is cached."""
    return Program(terms)
