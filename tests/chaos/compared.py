"""Bring the usage of a load to the ledger, and compare the ledger and the limit with the answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from django.db.models import Sum

from ratelimits.usage.counting import process_totals
from ratelimits.usage.models import DurabilityGap, Line, ProcessTotal
from tests.chaos.load import TIGHT, Load, Request
from tests.chaos.row import Row
from tests.support.usage.traffic import flow

#: The limit that all requests of the scope TIGHT share: permits at once, and permits a second.
CAPACITY, RATE = 20, 50
_SECOND = 1_000_000
#: Time (µs) in which one permit comes back.
_PERMIT = _SECOND // RATE
#: Seconds by which a fault steps a clock.
STEP = 3600
#: Permits that may have come back, or not, around a step of the server's clock.
_UNKNOWN = 4


def row_of(fault: str, load: Load, ended: float, ahead: Sequence[float] = ()) -> Row:
    """Bring the usage to the ledger, and return the row of a fault that ended at `ended` (s, monotonic).

    The limit is measured by the moments that the server gave, without the whole hours by which its clock was stepped.
    At each moment of `ahead` (s since 1970) the server's clock jumped ahead, so all permits came back. When it jumps
    back, the time since the last decision is not known, so a few permits come back later.
    """
    flow()
    process_totals.write()
    unknown = _declared("unanswered")
    assert _declared("unmetered") == load.counted("passed"), "what a failure policy admitted is declared"
    sums = Line.objects.values("key").annotate(units=Sum("admitted_units")).order_by()
    ledger = {line["key"]: line["units"] for line in sums}
    admitted = load.counted("admitted")
    keys = admitted.keys() | ledger.keys()
    undecided = [one.began - ended for one in load.requests if one.outcome in ("passed", "denied", "raised")]
    since = time.time() - time.monotonic()
    moments = sorted((_without_steps(one, since), one) for one in load.requests if one.at and one.scope == TIGHT)
    over, under = _against_the_limit(moments, unknown.total(), ahead)
    return Row(
        fault,
        len(load.requests),
        len(load.requests) / load.seconds,
        len(load.errors),
        load.counted("denied").total(),
        max(one.seconds for one in load.requests),
        over,
        under,
        sum(max(admitted[key] - ledger.get(key, 0), 0) for key in keys),
        sum(max(ledger.get(key, 0) - admitted[key] - unknown[key], 0) for key in keys),
        unknown.total(),
        DurabilityGap.objects.exists(),
        max([0.0, *undecided]),
    )


def _without_steps(one: Request, since: float) -> int:
    """Return the moment of a decision. `since` is the time of 1970 on the monotonic clock, negated (s)."""
    hours = round((one.at / _SECOND - (one.began + since)) / STEP)
    return one.at - hours * STEP * _SECOND


def _against_the_limit(
    moments: Sequence[tuple[int, Request]], unanswered: int, ahead: Sequence[float]
) -> tuple[int, int]:
    """Return how many requests were admitted above the limit, and how many were refused below it.

    `moments` are the decisions in their order, with their moments (µs). Each of the `unanswered` requests may have
    taken a permit.
    """
    capacity = (CAPACITY + (_UNKNOWN if ahead else 0)) * _PERMIT
    least = (CAPACITY - (_UNKNOWN if ahead else 0) - unanswered) * _PERMIT
    over = under = spent = previous = 0
    for moment, one in moments:
        spent = max(spent - (moment - previous), 0)
        if any(previous < jump * _SECOND <= moment for jump in ahead):
            spent = 0
        previous = moment
        if one.outcome == "admitted":
            over += spent + _PERMIT > capacity
            spent = min(spent + _PERMIT, capacity)
        else:
            under += spent + _PERMIT <= least
    return over, under


def _declared(kind: str) -> Counter[str]:
    """Return the requests that reports declare as unanswered or unmetered, by key."""
    totals = ProcessTotal.objects.filter(kind=kind).values("key").annotate(sum=Sum("requests")).order_by()
    return Counter({total["key"]: total["sum"] for total in totals})
