"""Cross-check the ledger with process totals: processes can never have been granted more than the ledger has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from django.db.models import Q, Sum

from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import PeriodUsage, ProcessTotal
from ratelimits.reports.periods import SECOND


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requests of one meter in one billing period: in the ledger, and as the processes say.

    `granted` misses what a process that was killed had not written yet, so it may be less than `ledger`. `edge` is
    its part in the first and the last 15 minutes, which the process's clock may have put into the wrong period.
    """

    meter: str
    ledger: int
    granted: int
    unanswered: int = 0
    unmetered: int = 0
    edge: int = 0

    @property
    def holds(self) -> bool:
        """Whether the ledger has all that was granted."""
        return self.granted - self.edge <= self.ledger


def compare(using: str, account: str, start: int, end: int) -> list[Comparison]:
    """Compare by meter, in the billing period of an account that starts and ends at these µs since 1970 UTC."""
    usage = PeriodUsage.objects.using(using).filter(account=account)
    return compare_all(using, {account: usage}, start, end)[account]


def compare_all(
    using: str, usage: Mapping[str, Iterable[PeriodUsage]], start: int, end: int
) -> dict[str, list[Comparison]]:
    """Compare for the accounts of these running totals, whose billing periods start and end alike."""
    start, end = start // SECOND, end // SECOND
    accounts = list(usage)
    ledger = {account: _requests(rows, start, end) for account, rows in usage.items()}
    said = ProcessTotal.objects.using(using).filter(account__in=accounts, bin__gte=start, bin__lt=end)
    at_edge = Q(bin__lt=start + BIN_SECONDS) | Q(bin__gt=end - 2 * BIN_SECONDS)
    sums = said.values_list("account", "meter", "kind").order_by()
    totals: dict[str, dict[tuple[str, str], tuple[int, int]]] = {account: {} for account in accounts}
    for account, meter, kind, requests, edge in sums.annotate(
        total=Sum("requests"), edge=Sum("requests", filter=at_edge)
    ):
        totals[account][meter, kind] = requests, edge or 0
    return {account: list(_compared(ledger[account], totals[account])) for account in accounts}


def _requests(usage: Iterable[PeriodUsage], start: int, end: int) -> Counter[str]:
    """Return the requests of a billing period in the ledger, by meter; moments are s since 1970 UTC."""
    found: Counter[str] = Counter()
    for row in usage:
        # Not of the period that starts then alone: usage of before and after an edit may be billed as one period.
        if row.period < end and (row.period >= start or (row.period_end or 0) > start):
            found[row.meter] += row.admitted_requests
    return found


def _compared(ledger: Mapping[str, int], totals: Mapping[tuple[str, str], tuple[int, int]]) -> Iterator[Comparison]:
    for meter in sorted({*ledger, *(meter for meter, _kind in totals)}):
        granted, edge = totals.get((meter, "admitted"), (0, 0))
        yield Comparison(
            meter=meter,
            ledger=ledger.get(meter, 0),
            granted=granted,
            unanswered=totals.get((meter, "unanswered"), (0, 0))[0],
            unmetered=totals.get((meter, "unmetered"), (0, 0))[0],
            edge=edge,
        )


def text(compared: Iterable[Comparison]) -> str:
    """Return what a report prints where the ledger has less than processes were granted; "" where it has all."""
    return "; ".join(
        f"witness {each.meter} processes={each.granted} ledger={each.ledger}" for each in compared if not each.holds
    )
