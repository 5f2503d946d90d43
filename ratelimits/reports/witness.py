"""The ledger beside the second witness: what processes say they were granted may never be more than the ledger has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.db.models import Sum

from ratelimits.models import PeriodUsage, ProcessTotal
from ratelimits.reports.periods import SECOND


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requests of one meter in one billing period: in the ledger, and as the processes say.

    `witnessed` misses what a process that was killed had not written yet, so it may be less than `ledger`.
    """

    meter: str
    ledger: int
    witnessed: int
    unanswered: int
    unmetered: int

    @property
    def holds(self) -> bool:
        """Whether the ledger has all that was granted."""
        return self.witnessed <= self.ledger


def compare(using: str, account: str, start: int, end: int) -> Iterator[Comparison]:
    """By meter, of the billing period of an account that starts and ends at these µs since 1970 UTC."""
    usage = PeriodUsage.objects.using(using).filter(account=account, period=start // SECOND)
    ledger = dict(usage.values_list("meter").order_by().annotate(Sum("admitted_requests")))
    said = ProcessTotal.objects.using(using).filter(account=account, bin__gte=start // SECOND, bin__lt=end // SECOND)
    totals: dict[tuple[str, str], int] = {
        (meter, kind): requests
        for meter, kind, requests in said.values_list("meter", "kind").order_by().annotate(Sum("requests"))
    }
    for meter in sorted({*ledger, *(meter for meter, _kind in totals)}):
        yield Comparison(
            meter,
            ledger.get(meter, 0),
            totals.get((meter, "admitted"), 0),
            totals.get((meter, "unanswered"), 0),
            totals.get((meter, "unmetered"), 0),
        )
