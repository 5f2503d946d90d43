"""Refusals of one key or account, each with its rule: by quarter of an hour for a day, and by day for a month.

They come from totals with an index on account and key. So reading them does not take longer as the ledger grows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from django.db.models import Q, Sum

from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.models import KeyTotal, ProcessTotal
from ratelimits.models.status.totals import DAY, HOUR, QUARTER, newest_days

#: Number of rows of each list.
MAX_REFUSALS = 50


@dataclass(frozen=True, slots=True)
class RefusedRequests:
    """Requests that were refused from `start` on, for `seconds`.

    start    in seconds since 1970 UTC
    rule     the primary key of the rule that refused them; 0 for a block
    target   the block that refused them, if it is known
    shadow   requests that a rule in shadow mode would have refused, and that were admitted
    """

    start: int
    seconds: int
    key: str
    rule: int
    meter: str
    denied: int
    shadow: int = 0
    target: str = ""


def refused_lately(account: str, key: str, now: float) -> list[RefusedRequests]:
    """Return the refusals of the last 24 hours by quarter of an hour, newest first.

    If `key` is "", return those of all keys of the account. Return MAX_REFUSALS + 1 rows if there are more than
    MAX_REFUSALS. `now` is in seconds since 1970 UTC.
    """
    last = int(now) // QUARTER * QUARTER
    return _refused(QUARTER, range(last - 24 * HOUR, last + 1, QUARTER), account, key)


def refused_by_day(account: str, key: str, now: float) -> list[RefusedRequests]:
    """Return the refusals of the last 30 days by day in UTC, newest first. The arguments are as in `refused_lately`."""
    return _refused(DAY, newest_days(now, 30), account, key)


def _refused(span: int, starts: Sequence[int], account: str, key: str) -> list[RefusedRequests]:
    # Name every start, so that the database can use the index.
    rows = KeyTotal.objects.using(conf.DATABASE).filter(span=span, start__in=list(starts), account=account)
    if key:
        rows = rows.filter(key=ledger_name(key))
    rows = rows.filter(Q(denied_requests__gt=0) | Q(shadow_requests__gt=0)).order_by("-start", "-denied_requests", "pk")
    columns = "start", "key", "rule", "meter", "denied_requests", "shadow_requests"
    return [
        RefusedRequests(start, span, of, rule, meter, denied, shadow)
        for start, of, rule, meter, denied, shadow in rows.values_list(*columns)[: MAX_REFUSALS + 1]
    ]


def blocked_lately(targets: Collection[str], now: float) -> list[RefusedRequests]:
    """Return the requests that blocks of these targets refused in 24 hours, by quarter of an hour, newest first.

    Processes have counted them. The number of a target covers all requests that its block refused.
    """
    since = int(now) // QUARTER * QUARTER - 24 * HOUR
    rows = ProcessTotal.objects.using(conf.DATABASE).filter(kind="blocked", bin__gte=since)
    rows = rows.filter(key__in=[ledger_name(target) for target in targets])
    found: dict[tuple[int, str], RefusedRequests] = {}
    for start, target, meter, requests in rows.order_by().values_list("bin", "key", "meter").annotate(Sum("requests")):
        known = found.get((start, target))
        # A request with several meters counts only once.
        if known is None or known.denied < requests:
            found[start, target] = RefusedRequests(start, QUARTER, "", 0, meter, requests, target=target)
    return sorted(found.values(), key=lambda one: (-one.start, one.target))[: MAX_REFUSALS + 1]
