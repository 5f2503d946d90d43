"""Read how much usage of a key the ledger has, for rules that start with this usage."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import Sum

from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.conf import conf
from ratelimits.models.ledger import Line


class LedgerUsage(NamedTuple):
    """The usage of a key in a meter in a span of time.

    account, key     the account, and the API key or user; "" for all keys of the account
    billing_periods  starts of the account's billing periods that overlap the span, in µs since 1970 UTC
    start, end       the span, in µs since 1970 UTC
    """

    account: str
    key: str
    meter: str
    billing_periods: tuple[int, ...]
    start: int
    end: int


def read(usage: LedgerUsage) -> int:
    """Return the number of units that were admitted and not refunded."""
    periods = [start // MICROSECONDS for start in usage.billing_periods]
    lines = Line.objects.using(conf.DATABASE).filter(account=usage.account, period__in=periods, meter=usage.meter)
    lines = lines.filter(bin__gte=usage.start // MICROSECONDS, bin__lt=usage.end // MICROSECONDS)
    if usage.key:
        lines = lines.filter(key=usage.key)
    sums = lines.aggregate(admitted=Sum("admitted_units"), refunded=Sum("refunded_units"))
    return max((sums["admitted"] or 0) - (sums["refunded"] or 0), 0)
