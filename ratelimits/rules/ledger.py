"""Read how much usage of a key the ledger has. Under some rules, the count of a key starts at this usage, not at 0."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import Sum

from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.conf import conf
from ratelimits.models.ledger import Line


class LedgerQuery(NamedTuple):
    """The usage to read: the usage of one key (or account), in one meter, in one span of time.

    key              an API key or a user; "" for all keys of the account
    billing_periods  starts of the account's billing periods that overlap the span, in µs since 1970 UTC
    start, end       the span, in µs since 1970 UTC
    """

    account: str
    key: str
    meter: str
    billing_periods: tuple[int, ...]
    start: int
    end: int


def read(query: LedgerQuery) -> int:
    """Return the number of units that were admitted and not refunded, at least 0."""
    periods = [start // MICROSECONDS for start in query.billing_periods]
    lines = Line.objects.using(conf.DATABASE).filter(account=query.account, period__in=periods, meter=query.meter)
    lines = lines.filter(bin__gte=query.start // MICROSECONDS, bin__lt=query.end // MICROSECONDS)
    if query.key:
        lines = lines.filter(key=query.key)
    sums = lines.aggregate(admitted=Sum("admitted_units"), refunded=Sum("refunded_units"))
    return max((sums["admitted"] or 0) - (sums["refunded"] or 0), 0)
