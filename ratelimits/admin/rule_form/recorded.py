"""Replay recorded requests against a rule that may be unsaved. The real scripts decide, with a virtual clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from ratelimits import rules
from ratelimits.algorithms.limits import Algorithm
from ratelimits.algorithms.parsing import HORIZON, MICROSECONDS
from ratelimits.engine.call import Op
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import RecordedRequest, Rule
from ratelimits.models.fields.scopes import split_scope
from ratelimits.recording.trace import Trace, newest
from ratelimits.rules.edited import EditedRule
from ratelimits.simulate import Replay, Simulator, TraceLine
from ratelimits.simulate.trial import SLOTS, Slot, Tried

#: How far back requests are replayed, in seconds, and the maximum number of them (the newest).
LOOK_BACK, MAX_REQUESTS = 86_400, 20_000
#: The same for the chart, which is drawn while the user types.
HOUR, MAX_OF_HOUR = 3_600, 2_000


class Replayed(NamedTuple):
    """A request as the rule would have decided it. `at` (since 1970 UTC) and `wait` are in µs."""

    at: int
    key: str
    cost: int
    allowed: bool
    wait: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The decisions of a rule about recorded requests.

    requests      the requests that it counts, by key
    refused       those that it would have refused, by key
    units         the units of all these requests, and of those that it would have admitted
    longest_wait  the longest time that a request would have waited, in µs
    """

    requests: Counter[str]
    refused: Counter[str]
    units: tuple[int, int]
    longest_wait: int


def recorded_day(*edits: Rule) -> Trace:
    """Return the recorded requests of the last 24 hours that may be in the scopes of these rules."""
    return _newest(LOOK_BACK, MAX_REQUESTS, edits)


def _newest(seconds: int, most: int, edits: Sequence[Rule]) -> Trace:
    since = (time.time_ns() // 1000) - seconds * MICROSECONDS
    return newest(since, most, {split_scope(rule.scope)[0] for rule in edits})


def replay_result(rule: Rule, trace: Trace) -> ReplayResult:
    """Return what a rule would have decided. Raise one of the errors UNAVAILABLE."""
    decided = replayed(rule, trace)
    return ReplayResult(
        Counter(one.key for one in decided),
        Counter(one.key for one in decided if not one.allowed),
        (sum(one.cost for one in decided), sum(one.cost for one in decided if one.allowed)),
        max((one.wait for one in decided if one.allowed), default=0),
    )


def replayed(rule: Rule, trace: Trace) -> list[Replayed]:
    """Return the requests that the rule counts, in order, as it would have decided them.

    Plans, overrides, blocks and allows apply as they are now. Each key starts as if it had never been used. Raise one
    of the errors UNAVAILABLE.
    """
    made_by = [_identity(row) for row in trace.rows]
    identities = set(made_by)
    current = rules.current().having(*identities)
    outside = {identity for identity in identities if current.access(identity) is not None}
    edited = EditedRule(current, rule, identities)
    lines: list[tuple[Replay, TraceLine]] = []
    replays: dict[Algorithm, Replay] = {}
    for row, identity in zip(trace.rows, made_by, strict=True):
        cost = row.costs.get(rule.meter, 0)
        found = edited.applied(row.scope, row.method, identity) if cost and identity not in outside else None
        if found is None:
            continue
        applied, key = found
        # Keys with an override have an algorithm with other numbers, so they need a replay of their own.
        replay = replays.get(applied.algorithm)
        if replay is None:
            replay = replays[applied.algorithm] = Replay((applied.algorithm,), f"{len(replays)}:")
        timeout = min(int(applied.max_wait * MICROSECONDS), HORIZON) if applied.algorithm.may_wait else 0
        lines.append((replay, TraceLine(row.at, row.at, Op.TRY, key, cost, timeout, "")))
    with Simulator(current_server().wire) as simulator:
        return [
            Replayed(line.now, line.key, line.cost, outcome.allowed, outcome.wait)
            for _replay, line, outcome in simulator.run(lines)
        ]


def _identity(row: RecordedRequest) -> Identity:
    return Identity(row.user or None, row.api_key or None, row.account or None, row.address or None)


def recorded_hour(rule: Rule) -> Tried | None:
    """Return what a rule would have admitted in the hour before the newest recorded request; None if there is none.

    If the hour has more than MAX_OF_HOUR requests, take a shorter time. Raise one of the errors UNAVAILABLE.
    """
    trace = _newest(LOOK_BACK, MAX_OF_HOUR, [rule])
    if not trace.rows:
        return None
    end = trace.rows[-1].at + 1
    start = max(end - HOUR * MICROSECONDS, trace.rows[0].at if trace.more else 0)
    decided = replayed(rule, trace._replace(rows=[row for row in trace.rows if row.at >= start]))
    if not decided:
        return None
    asked, admitted = sum(one.cost for one in decided), [one for one in decided if one.allowed]
    return Tried(
        "recorded",
        Decimal(end - start) / MICROSECONDS,
        asked,
        Decimal(0),
        Decimal(0),
        asked,
        sum(one.cost for one in admitted),
        Decimal(max((one.wait for one in admitted), default=0)) / MICROSECONDS,
        tuple(_slots(decided, start, end - start)),
    )


def _slots(decided: Sequence[Replayed], start: int, length: int) -> Iterator[Slot]:
    slots = [[0, 0, 0] for _ in range(SLOTS)]
    for one in decided:
        place = (one.at - start) * SLOTS // length
        slots[place][0] += one.cost
        if not one.allowed:
            slots[place][2] += one.cost
            continue
        proceeds = (one.at + one.wait - start) * SLOTS // length
        if proceeds < SLOTS:
            slots[proceeds][1] += one.cost
    yield from (Slot(*counts) for counts in slots)
