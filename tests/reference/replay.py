"""A trace, line by line, against the exact definitions."""

from __future__ import annotations

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
    """One rule's definition; ValueError when the rule makes no sense."""
    if not isinstance(data, dict):
        raise ValueError(f"a rule must be an object, not {data!r}")
    definition = ALGORITHMS.get(str(data.get("algorithm")))
    if definition is None:
        raise ValueError(f"algorithm {data.get('algorithm')!r} is not known")
    limit: Limit = definition(data)
    return limit


def limits_from(rule: Any) -> list[Limit]:
    """One rule or a list of them."""
    rules = rule if isinstance(rule, list) else [rule]
    if not rules:
        raise ValueError("a list of rules needs at least one")
    return [limit_from(data) for data in rules]


@dataclass(frozen=True, slots=True)
class Key:
    """`states` has one for each limit, None where none has come into being."""

    newest: int
    states: tuple[Any, ...]


class Replay:
    """Replays the lines of one trace against a rule, or several decided together, on fresh state."""

    def __init__(self, rule: Any) -> None:
        self.limits: list[Limit] = limits_from(rule)
        self.keys: dict[str, Key] = {}

    def step(self, line: dict[str, Any]) -> dict[str, Any]:
        """The answer to one line; ValueError when the line makes no sense, which changes nothing."""
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
        now, held = self.as_at(self.keys.get(key), moment)
        if op in ("try_acquire", "acquire", "peek") and cost:
            answer = self.decided(key, held, now, op, cost, None if op == "acquire" else patience, lease)
            return {"at": line["at"], **answer}
        if op == "create":
            self.keys[key] = held = self.born(held, now)
        elif held is not None and (op == "release" or (op == "refund" and cost)):
            self.keys[key] = held = self.given_back(held, now, op, cost, lease)
        return {"at": line["at"], **self.told(self.born(held, now), now)}

    def as_at(self, held: Key | None, moment: int) -> tuple[int, Key | None]:
        """The moment that a decision is made as at, and the key's state told as of it."""
        if held is None or moment >= held.newest:
            return moment, held
        if moment >= held.newest - JUMP:
            return held.newest, held
        states = (
            None if state is None else limit.jumped(state, held.newest, moment)
            for limit, state in zip(self.limits, held.states, strict=True)
        )
        return moment, Key(moment, tuple(states))

    def born(self, held: Key | None, now: int) -> Key:
        """The key with every limit in being."""
        if held is not None and None not in held.states:
            return held
        states = held.states if held is not None else (None,) * len(self.limits)
        pairs = zip(self.limits, states, strict=True)
        return Key(now, tuple(limit.born(now) if state is None else state for limit, state in pairs))

    def given_back(self, held: Key, now: int, op: str, cost: int, lease: str) -> Key:
        def less(limit: Limit, state: Any) -> Any:
            if state is None:
                return None
            return limit.released(state, now, lease) if op == "release" else limit.refunded(state, now, cost, lease)

        return Key(held.newest, tuple(map(less, self.limits, held.states)))

    def decided(
        self, key: str, held: Key | None, now: int, op: str, cost: int, patience: int | None, lease: str
    ) -> dict[str, Any]:
        before = self.born(held, now)
        verdicts = [
            limit.judge(state, now, cost, patience) for limit, state in zip(self.limits, before.states, strict=True)
        ]
        after = before
        if all(verdict.passes for verdict in verdicts):
            if op != "peek":
                pairs = zip(self.limits, before.states, strict=True)
                states = tuple(limit.charged(state, now, cost, lease) for limit, state in pairs)
                self.keys[key] = after = Key(now, states)
            return self.told(after, now, wait=max(verdict.wait for verdict in verdicts))
        never = any(verdict.retry_after is NEVER for verdict in verdicts)
        if op != "peek":
            stored = held if never else before
            if stored is not None:
                self.keys[key] = stored
        patient = [float("inf") if verdict.retry_after is NEVER else verdict.retry_after for verdict in verdicts]
        binding = patient.index(max(patient))
        retry_after = verdicts[binding].retry_after
        told = self.told(after, now)
        told |= {
            "allowed": False,
            "limit": self.limits[binding].shown,
            "retry_after": None if retry_after is NEVER else seconds(retry_after),
        }
        return told

    def told(self, key: Key, now: int, wait: int = 0) -> dict[str, Any]:
        """The answer of a state to a request that passes."""
        pairs = list(zip(self.limits, key.states, strict=True))
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
        """Every key's state under the new limits, from `moment` on."""
        for name, key in self.keys.items():
            now, held = self.as_at(key, moment)
            assert held is not None
            states = tuple(
                None if state is None or old.algorithm != new.algorithm else old.handed_over(state, now, new)
                for old, new, state in zip(self.limits, limits, held.states, strict=True)
            )
            self.keys[name] = Key(now, states)
        self.limits = limits


def text(line: dict[str, Any], field: str) -> str:
    value = line.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, not {value!r}")
    return value
