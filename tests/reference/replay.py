"""Replay a trace, line by line, by the exact definitions."""

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
    """Return one rule's definition; raise ValueError if the rule makes no sense."""
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
class Held:
    """A limit's state for a key, and the newest moment at which it was born, charged or had its rule changed."""

    newest: int
    state: Any


Key = tuple[Held | None, ...]
"""One for each limit, None where none has come into being."""


class Replay:
    """Replay the lines of one trace under one rule, or several that are decided together, on fresh state."""

    def __init__(self, rule: Any) -> None:
        self.limits: list[Limit] = limits_from(rule)
        self.keys: dict[str, Key] = {}

    def step(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one line. Raise ValueError if the line makes no sense; then nothing is changed."""
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
        now, held = self.as_at(self.keys.get(key) or (None,) * len(self.limits), moment)
        if op in ("try_acquire", "acquire", "peek") and cost:
            answer = self.decided(key, held, now, op, cost, None if op == "acquire" else patience, lease)
            return {"at": line["at"], **answer}
        if op == "create":
            held = self.keys[key] = self.born(held, now)
        elif op in ("release", "refund"):
            held = self.keys[key] = self.given_back(held, now, op, cost, lease)
        return {"at": line["at"], **self.told(self.born(held, now), now)}

    def as_at(self, key: Key, moment: int) -> tuple[int, Key]:
        """Return the moment at which the decision is made, and the key's states at that moment."""
        now = clamped(key, moment)
        return now, tuple(
            Held(now, limit.jumped(held.state, held.newest, now)) if held is not None and held.newest > now else held
            for limit, held in zip(self.limits, key, strict=True)
        )

    def born(self, key: Key, now: int) -> Key:
        """Return the key after every limit has a state."""
        pairs = zip(self.limits, key, strict=True)
        return tuple(Held(now, limit.born(now)) if held is None else held for limit, held in pairs)

    def given_back(self, key: Key, now: int, op: str, cost: int, lease: str) -> Key:
        def less(limit: Limit, held: Held | None) -> Held | None:
            if held is None:
                return None
            if op == "release":
                return Held(held.newest, limit.released(held.state, now, lease))
            return Held(held.newest, limit.refunded(held.state, now, cost, lease))

        return tuple(map(less, self.limits, key))

    def decided(
        self, name: str, held: Key, now: int, op: str, cost: int, patience: int | None, lease: str
    ) -> dict[str, Any]:
        before = [one for one in self.born(held, now) if one is not None]
        pairs = list(zip(self.limits, before, strict=True))
        verdicts = [limit.judge(one.state, now, cost, patience) for limit, one in pairs]
        if all(verdict.passes for verdict in verdicts):
            after: Key = tuple(before)
            if op != "peek":
                after = tuple(Held(now, limit.charged(one.state, now, cost, lease)) for limit, one in pairs)
                self.keys[name] = after
            return self.told(after, now, wait=max(verdict.wait for verdict in verdicts))
        if op != "peek":
            self.keys[name] = held if any(verdict.retry_after is NEVER for verdict in verdicts) else tuple(before)
        longest = [float("inf") if verdict.retry_after is NEVER else verdict.retry_after for verdict in verdicts]
        binding = longest.index(max(longest))
        retry_after = verdicts[binding].retry_after
        return self.told(tuple(before), now) | {
            "allowed": False,
            "limit": self.limits[binding].shown,
            "retry_after": None if retry_after is NEVER else seconds(retry_after),
        }

    def told(self, key: Key, now: int, wait: int = 0) -> dict[str, Any]:
        """Return the answer of a key to a request that passes."""
        pairs = [(limit, held.state) for limit, held in zip(self.limits, key, strict=True) if held is not None]
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
                held if old.algorithm == new.algorithm else None
                for (old, new, _), held in zip(triples, key, strict=True)
            ]
            now = clamped(kept, moment)

            def changed(old: Limit, new: Limit, held: Held | None, now: int = now) -> Held | None:
                if held is None:
                    return None
                if held.newest > now:
                    return Held(now, old.jumped_over(held.state, held.newest, now, new))
                return Held(now, old.handed_over(held.state, now, new))

            self.keys[name] = tuple(changed(old, new, kept[place]) for old, new, place in triples)
        self.limits = limits


def clamped(key: Sequence[Held | None], moment: int) -> int:
    """Return the newest moment of the limits that are at most one minute ahead, if it is later."""
    newest = [held.newest for held in key if held is not None]
    return max([moment, *(one for one in newest if one <= moment + JUMP)])


def text(line: dict[str, Any], field: str) -> str:
    value = line.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, not {value!r}")
    return value
