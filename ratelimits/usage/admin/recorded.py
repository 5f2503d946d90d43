"""Let a rule decide recorded requests again, with the real scripts and a virtual clock. The rule may be unsaved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from ratelimits import rules
from ratelimits.algorithms.base import HORIZON, MICROSECONDS
from ratelimits.algorithms.limits import Algorithm
from ratelimits.engine.call import Op
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.models.fields.scopes import split_scope
from ratelimits.rules.snapshot import EditedRule
from ratelimits.simulate import Replay, Simulator, TraceLine
from ratelimits.simulate.trial import SLOTS, Slot, TrialResult
from ratelimits.usage.models import RecordedRequest
from ratelimits.usage.recording import Trace, newest

#: Requests of the last LOOK_BACK seconds are replayed.
LOOK_BACK = 86_400
#: Maximum number of requests that are replayed. The newest requests are taken.
MAX_REQUESTS = 20_000
#: The chart on the form changes while the user types. So it replays only the requests of this number of seconds.
HOUR = 3_600
#: Maximum number of requests that the chart replays.
MAX_OF_HOUR = 2_000


class ReplayedRequest(NamedTuple):
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

    requests        the number of requests that the rule counts, by key
    refused         the number of requests that the rule would have refused, by key
    refused_too     the number of these refused requests that were also refused at the time, by key
    admitted_now    the number of requests that were refused at the time, but that this rule would have admitted, by key
    units         the units of all requests that the rule counts
    admitted_units  the units that the rule would have admitted
    longest_wait    the longest time that a request would have waited, in µs
    """

    requests: Counter[str]
    refused: Counter[str]
    refused_too: Counter[str]
    admitted_now: Counter[str]
    units: int
    admitted_units: int
    longest_wait: int


def recorded_day(*tried_rules: Rule) -> Trace:
    """Return the recorded requests of the last 24 hours that may be in the scopes of these rules."""
    return _newest(LOOK_BACK, MAX_REQUESTS, tried_rules)


def _newest(seconds: int, count: int, tried_rules: Sequence[Rule]) -> Trace:
    since = (time.time_ns() // 1000) - seconds * MICROSECONDS
    scopes_and_methods = [split_scope(rule.scope) for rule in tried_rules]
    return newest(since, count, {scope for scope, _methods in scopes_and_methods})


def replay_result(rule: Rule, trace: Trace) -> ReplayResult:
    """Return what a rule would have decided. Raise an error of `UNAVAILABLE` if nothing can be decided."""
    decided = replayed(rule, trace)
    admitted = [request for request in decided if request.allowed]
    refused = [request for request in decided if not request.allowed]
    return ReplayResult(
        requests=Counter(request.key for request in decided),
        refused=Counter(request.key for request in refused),
        refused_too=Counter(request.key for request in refused if request.was_refused),
        admitted_now=Counter(request.key for request in admitted if request.was_refused),
        units=sum(request.cost for request in decided),
        admitted_units=sum(request.cost for request in admitted),
        longest_wait=max((request.wait for request in admitted), default=0),
    )


def replayed(rule: Rule, trace: Trace) -> list[ReplayedRequest]:
    """Return the requests that the rule counts, in order, each with the rule's decision.

    The present plans, overrides, blocks and allows apply. At the start, each key has all permits. Raise an error of
    `UNAVAILABLE` if nothing can be decided.
    """
    identities_of_rows = [_identity(row) for row in trace.rows]
    identities = set(identities_of_rows)
    current = rules.current().with_rows_of(*identities)
    blocked_or_allowed = {identity for identity in identities if current.access(identity) is not None}
    edited = EditedRule(current, rule, identities)
    lines: list[tuple[Replay, TraceLine]] = []
    were_refused: list[bool] = []
    replays: dict[Algorithm, Replay] = {}
    for row, identity in zip(trace.rows, identities_of_rows, strict=True):
        cost = row.costs.get(rule.meter, 0)
        is_counted = cost and identity not in blocked_or_allowed
        rule_and_key = edited.applied(row.scope, row.method, identity) if is_counted else None
        if rule_and_key is None:
            continue
        applied, key = rule_and_key
        # A key with an override has an algorithm with other numbers. There is one replay for each algorithm.
        replay = replays.get(applied.algorithm)
        if replay is None:
            prefix = f"{len(replays)}:"  # Each replay needs a prefix of its own.
            replay = replays[applied.algorithm] = Replay((applied.algorithm,), prefix)
        max_wait = min(int(applied.max_wait * MICROSECONDS), HORIZON) if applied.algorithm.may_wait else 0  # In µs.
        line = TraceLine(at=row.at, now=row.at, op=Op.TRY, key=key, cost=cost, timeout=max_wait, lease="")
        lines.append((replay, line))
        were_refused.append(row.refused)
    with Simulator(current_server().wire) as simulator:
        return [
            ReplayedRequest(line.now, line.key, line.cost, outcome.allowed, outcome.wait, was_refused)
            for (_replay, line, outcome), was_refused in zip(simulator.run(lines), were_refused, strict=True)
        ]


def _identity(row: RecordedRequest) -> Identity:
    return Identity(row.user or None, row.api_key or None, row.account or None, row.address or None)


def recorded_hour(rule: Rule) -> Iterator[TrialResult]:
    """Yield what a rule would have admitted in the hour before the newest recorded request.

    If the hour has more than `MAX_OF_HOUR` requests, take a shorter time. Yield nothing if there is no recorded request
    that the rule counts. Raise an error of `UNAVAILABLE` if nothing can be decided.
    """
    trace = _newest(LOOK_BACK, MAX_OF_HOUR, [rule])
    if not trace.rows:
        return
    end = trace.rows[-1].at + 1  # The span includes its start and excludes its end.
    known_since = trace.rows[0].at if trace.more else 0  # If there are older requests, they were not read.
    start = max(end - HOUR * MICROSECONDS, known_since)
    decided = replayed(rule, trace._replace(rows=[row for row in trace.rows if row.at >= start]))
    if not decided:
        return
    requested = sum(request.cost for request in decided)
    admitted_requests = [request for request in decided if request.allowed]
    yield TrialResult(
        kind="recorded",
        length=Decimal(end - start) / MICROSECONDS,
        permits=requested,
        interval=Decimal(0),
        duration=Decimal(0),
        requested=requested,
        admitted=sum(request.cost for request in admitted_requests),
        longest_wait=Decimal(max((request.wait for request in admitted_requests), default=0)) / MICROSECONDS,
        slots=tuple(_slots(decided, start, end - start)),
    )


def _slots(decided: Sequence[ReplayedRequest], start: int, length: int) -> Iterator[Slot]:
    """Yield the slots of a span of time. `start` (since 1970 UTC) and `length` are in µs.

    The permits of an admitted request are counted as admitted in the slot in which the request stops waiting. If it
    stops waiting after the span, its permits are not counted as admitted.
    """
    requested, admitted, refused = ([0] * SLOTS for _ in range(3))
    for request in decided:
        slot = (request.at - start) * SLOTS // length
        requested[slot] += request.cost
        if not request.allowed:
            refused[slot] += request.cost
            continue
        slot_after_wait = (request.at + request.wait - start) * SLOTS // length
        if slot_after_wait < SLOTS:
            admitted[slot_after_wait] += request.cost
    yield from map(Slot, requested, admitted, refused)
