"""Replay a trace, line by line, with the model of the algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.reference.amounts import exact, nearest, number, seconds, whole
from tests.reference.concurrency import Concurrency
from tests.reference.levels import Gcra, LeakyBucket, TokenBucket
from tests.reference.limit import JUMP, NEVER, Limit
from tests.reference.queue import LeakyBucketQueue
from tests.reference.sliding import SlidingLog, SlidingWindow
from tests.reference.smooth import SmoothBursty, SmoothWarmingUp
from tests.reference.windows import CalendarWindow, FixedWindow

ALGORITHMS: dict[str, Any] = {
    definition.algorithm: definition
    for definition in (
        FixedWindow,
        CalendarWindow,
        SlidingWindow,
        SlidingLog,
        TokenBucket,
        Gcra,
        LeakyBucket,
        LeakyBucketQueue,
        SmoothBursty,
        SmoothWarmingUp,
        Concurrency,
    )
}
OPS = ("create", "try_acquire", "acquire", "peek", "refund", "release", "reset", "set_rule")
FIELDS = {"at", "op", "key", "cost", "timeout", "lease", "rule"}


def limit_from(data: Any) -> Limit:
    """Return one rule's definition; raise ValueError if the rule is not valid."""
    if not isinstance(data, dict):
        raise ValueError(f"a rule must be an object, not {data!r}")
    definition = ALGORITHMS.get(str(data.get("algorithm")))
    if definition is None:
        raise ValueError(f"algorithm {data.get('algorithm')!r} is not known")
    limit: Limit = definition(data)
    return limit


def limits_from(rule: Any) -> list[Limit]:
    """Return the definitions of one rule or of a list of rules."""
    rules = rule if isinstance(rule, list) else [rule]
    if not rules:
        raise ValueError("a list of rules needs at least one")
    return [limit_from(data) for data in rules]


@dataclass(frozen=True, slots=True)
class Stored:
    """A limit's state for a key, and the newest moment: when it was last created, charged or given another rule."""

    newest: int
    state: Any


Key = tuple[Stored | None, ...]
"""The states of a key: one for each limit, None if it is not created yet."""


class Replay:
    """Replay the lines of one trace under one rule, or under several that are decided together, with empty states."""

    def __init__(self, rule: Any) -> None:
        self.limits: list[Limit] = limits_from(rule)
        self.keys: dict[str, Key] = {}

    def step(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one line. Raise ValueError if the line is not valid; then nothing is changed."""
        if not isinstance(line, dict):
            raise ValueError(f"a line must be an object, not {line!r}")
        for field in line:
            if field not in FIELDS:
                raise ValueError(f"unknown field {field!r}")
        at = exact(line, "at")
        if at < 0:
            raise ValueError(f"at must not be before 0, not {line['at']!r}")
        op = line.get("op") or "try_acquire"
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, not {op!r}")
        cost = whole(line, "cost", 0, 1)
        key, lease = text(line, "key"), text(line, "lease")
        timeout = line.get("timeout")
        patience = 0 if timeout is None else max(0, nearest(number(timeout, "timeout")))
        limits = limits_from(line.get("rule")) if op == "set_rule" else None
        if limits is not None and len(limits) != len(self.limits):
            raise ValueError(f"set_rule has {len(limits)} rules for {len(self.limits)}")

        moment = nearest(at)
        if limits is not None:
            self.change(limits, moment)
        elif op == "reset":
            self.keys.pop(key, None)
        now, stored = self.at_decision(self.keys.get(key) or (None,) * len(self.limits), moment)
        if op in ("try_acquire", "acquire", "peek") and cost:
            answer = self.decided(key, stored, now, op, cost, None if op == "acquire" else patience, lease)
            return {"at": line["at"], **answer}
        if op == "create":
            stored = self.keys[key] = self.born(stored, now)
        elif op in ("release", "refund"):
            stored = self.keys[key] = self.given_back(stored, now, op, cost, lease)
        return {"at": line["at"], **self.answer(self.born(stored, now), now)}

    def at_decision(self, key: Key, moment: int) -> tuple[int, Key]:
        """Return the moment at which the decision is made, and the key's states at that moment."""
        now = clamped(key, moment)
        return now, tuple(
            Stored(now, limit.jumped(stored.state, stored.newest, now))
            if stored is not None and stored.newest > now
            else stored
            for limit, stored in zip(self.limits, key, strict=True)
        )

    def born(self, key: Key, now: int) -> Key:
        """Return the key after every limit has a state."""
        pairs = zip(self.limits, key, strict=True)
        return tuple(Stored(now, limit.born(now)) if stored is None else stored for limit, stored in pairs)

    def given_back(self, key: Key, now: int, op: str, cost: int, lease: str) -> Key:
        def less(limit: Limit, stored: Stored | None) -> Stored | None:
            if stored is None:
                return None
            if op == "release":
                return Stored(stored.newest, limit.released(stored.state, now, lease))
            return Stored(stored.newest, limit.refunded(stored.state, now, cost, lease))

        return tuple(map(less, self.limits, key))

    def decided(
        self, name: str, stored: Key, now: int, op: str, cost: int, patience: int | None, lease: str
    ) -> dict[str, Any]:
        before = [one for one in self.born(stored, now) if one is not None]
        pairs = list(zip(self.limits, before, strict=True))
        verdicts = [limit.judge(one.state, now, cost, patience) for limit, one in pairs]
        if all(verdict.passes for verdict in verdicts):
            after: Key = tuple(before)
            if op != "peek":
                after = tuple(Stored(now, limit.charged(one.state, now, cost, lease)) for limit, one in pairs)
                self.keys[name] = after
            return self.answer(after, now, wait=max(verdict.wait for verdict in verdicts))
        if op != "peek":
            self.keys[name] = stored if any(verdict.retry_after is NEVER for verdict in verdicts) else tuple(before)
        longest = [float("inf") if verdict.retry_after is NEVER else verdict.retry_after for verdict in verdicts]
        binding = longest.index(max(longest))
        retry_after = verdicts[binding].retry_after
        return self.answer(tuple(before), now) | {
            "allowed": False,
            "limit": self.limits[binding].shown,
            "retry_after": None if retry_after is NEVER else seconds(retry_after),
        }

    def answer(self, key: Key, now: int, wait: int = 0) -> dict[str, Any]:
        """Return the answer of a key to a request that passes."""
        pairs = [(limit, stored.state) for limit, stored in zip(self.limits, key, strict=True) if stored is not None]
        remaining = [limit.remaining(state, now) for limit, state in pairs]
        return {
            "allowed": True,
            "wait": seconds(wait),
            "limit": self.limits[remaining.index(min(remaining))].shown,
            "remaining": min(remaining),
            "retry_after": 0.0,
            "reset_after": seconds(max(limit.reset_after(state, now) for limit, state in pairs)),
        }

    def change(self, limits: list[Limit], moment: int) -> None:
        """Put every key's states under the new limits, from `moment` on."""
        triples = list(zip(self.limits, limits, range(len(limits)), strict=True))
        for name, key in self.keys.items():
            kept = [
                stored if old.algorithm == new.algorithm else None
                for (old, new, _), stored in zip(triples, key, strict=True)
            ]
            now = clamped(kept, moment)

            def changed(old: Limit, new: Limit, stored: Stored | None, now: int = now) -> Stored | None:
                if stored is None:
                    return None
                if stored.newest > now:
                    return Stored(now, old.jumped_over(stored.state, stored.newest, now, new))
                return Stored(now, old.handed_over(stored.state, now, new))

            self.keys[name] = tuple(changed(old, new, kept[place]) for old, new, place in triples)
        self.limits = limits


def clamped(key: Sequence[Stored | None], moment: int) -> int:
    """Return the moment, or the newest moment of the limits that are at most one minute ahead of it."""
    newest = [stored.newest for stored in key if stored is not None]
    return max([moment, *(one for one in newest if one <= moment + JUMP)])


def text(line: dict[str, Any], field: str) -> str:
    value = line.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, not {value!r}")
    return value
