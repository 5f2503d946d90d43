"""Let a rule decide recorded requests again. The rule may be unsaved. The real scripts decide, with a virtual clock."""

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
from ratelimits.simulate.trial import SLOTS, Slot, TrialResult

#: Requests of the last LOOK_BACK seconds are replayed.
LOOK_BACK = 86_400
#: Maximum number of requests that are replayed. The newest ones are taken.
MAX_REQUESTS = 20_000
#: The chart on the form changes while the user types. So it replays only the requests of this number of seconds.
HOUR = 3_600
#: Maximum number of requests that the chart replays.
MAX_OF_HOUR = 2_000


class Replayed(NamedTuple):
    """A recorded request, with the decision of the rule. `at` (since 1970 UTC) and `wait` are in µs.

    `was_refused` says whether the request was refused at the time, by any rule or block.
    """

    at: int
    key: str
    cost: int
    allowed: bool
    wait: int
    was_refused: bool


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The decisions of a rule about recorded requests.

    requests      the number of requests that the rule counts, by key
    refused       the number of requests that the rule would have refused, by key
    refused_too   the number of these that were refused at the time too, by key
    admitted_now  the number of requests that were refused at the time, but not by this rule, by key
    units         the units of all requests that the rule counts, and the units that it would have admitted
    longest_wait  the longest time that a request would have waited, in µs
    """

    requests: Counter[str]
    refused: Counter[str]
    refused_too: Counter[str]
    admitted_now: Counter[str]
    units: tuple[int, int]
    longest_wait: int


def recorded_day(*edits: Rule) -> Trace:
    """Return the recorded requests of the last 24 hours that may be in the scopes of these rules."""
    return _newest(LOOK_BACK, MAX_REQUESTS, edits)


def _newest(seconds: int, count: int, edits: Sequence[Rule]) -> Trace:
    since = (time.time_ns() // 1000) - seconds * MICROSECONDS
    return newest(since, count, {split_scope(rule.scope)[0] for rule in edits})


def replay_result(rule: Rule, trace: Trace) -> ReplayResult:
    """Return what a rule would have decided. Raise one of the errors in `UNAVAILABLE`."""
    decided = replayed(rule, trace)
    return ReplayResult(
        Counter(request.key for request in decided),
        Counter(request.key for request in decided if not request.allowed),
        Counter(request.key for request in decided if not request.allowed and request.was_refused),
        Counter(request.key for request in decided if request.allowed and request.was_refused),
        (sum(request.cost for request in decided), sum(request.cost for request in decided if request.allowed)),
        max((request.wait for request in decided if request.allowed), default=0),
    )


def replayed(rule: Rule, trace: Trace) -> list[Replayed]:
    """Return the requests that the rule counts, in order, each with the rule's decision.

    The present plans, overrides, blocks and allows apply. At the start, each key has all permits. Raise one of the
    errors in `UNAVAILABLE`.
    """
    identity_of_row = [_identity(row) for row in trace.rows]
    identities = set(identity_of_row)
    current = rules.current().having(*identities)
    blocked_or_allowed = {identity for identity in identities if current.access(identity) is not None}
    edited = EditedRule(current, rule, identities)
    lines: list[tuple[Replay, TraceLine]] = []
    were_refused: list[bool] = []
    replays: dict[Algorithm, Replay] = {}
    for row, identity in zip(trace.rows, identity_of_row, strict=True):
        cost = row.costs.get(rule.meter, 0)
        is_counted = cost and identity not in blocked_or_allowed
        rule_and_key = edited.applied(row.scope, row.method, identity) if is_counted else None
        if rule_and_key is None:
            continue
        applied, key = rule_and_key
        # An override gives a key an algorithm with other numbers. There is a replay for each such algorithm.
        replay = replays.get(applied.algorithm)
        if replay is None:
            replay = replays[applied.algorithm] = Replay((applied.algorithm,), f"{len(replays)}:")
        timeout = min(int(applied.max_wait * MICROSECONDS), HORIZON) if applied.algorithm.may_wait else 0
        lines.append((replay, TraceLine(row.at, row.at, Op.TRY, key, cost, timeout, "")))
        were_refused.append(row.refused)
    with Simulator(current_server().wire) as simulator:
        return [
            Replayed(line.now, line.key, line.cost, outcome.allowed, outcome.wait, was_refused)
            for (_replay, line, outcome), was_refused in zip(simulator.run(lines), were_refused, strict=True)
        ]


def _identity(row: RecordedRequest) -> Identity:
    return Identity(row.user or None, row.api_key or None, row.account or None, row.address or None)


def recorded_hour(rule: Rule) -> TrialResult | None:
    """Return what a rule would have admitted in the hour before the newest recorded request.

    If the hour has more than `MAX_OF_HOUR` requests, take a shorter time. Return None if there is no recorded request
    that the rule counts. Raise one of the errors in `UNAVAILABLE`.
    """
    trace = _newest(LOOK_BACK, MAX_OF_HOUR, [rule])
    if not trace.rows:
        return None
    end = trace.rows[-1].at + 1
    start = max(end - HOUR * MICROSECONDS, trace.rows[0].at if trace.more else 0)
    decided = replayed(rule, trace._replace(rows=[row for row in trace.rows if row.at >= start]))
    if not decided:
        return None
    requested, admitted = sum(request.cost for request in decided), [request for request in decided if request.allowed]
    return TrialResult(
        "recorded",
        Decimal(end - start) / MICROSECONDS,
        requested,
        Decimal(0),
        Decimal(0),
        requested,
        sum(request.cost for request in admitted),
        Decimal(max((request.wait for request in admitted), default=0)) / MICROSECONDS,
        tuple(_slots(decided, start, end - start)),
    )


def _slots(decided: Sequence[Replayed], start: int, length: int) -> Iterator[Slot]:
    slots = [[0, 0, 0] for _ in range(SLOTS)]
    for request in decided:
        slot = (request.at - start) * SLOTS // length
        slots[slot][0] += request.cost
        if not request.allowed:
            slots[slot][2] += request.cost
            continue
        proceeding_slot = (request.at + request.wait - start) * SLOTS // length
        if proceeding_slot < SLOTS:
            slots[proceeding_slot][1] += request.cost
    yield from (Slot(*counts) for counts in slots)
