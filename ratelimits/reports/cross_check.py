"""Compare the ledger with the process totals.

The processes together must never have counted more admitted requests than the ledger has. (Requests at the edge of a
period are not compared, see `Comparison.edge`.)
"""

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
    """The requests of one meter in one billing period, in the ledger and in the process totals."""

    meter: str
    #: Admitted requests in the ledger.
    ledger: int
    #: Admitted requests in the process totals. A process that is killed does not write its last requests, so `counted`
    #: can be lower than `ledger`.
    counted: int
    #: Requests whose replies from Redis were lost.
    unanswered: int = 0
    #: Requests that a failure policy let through while Redis did not answer.
    unmetered: int = 0
    #: The part of `counted` in the first and the last quarter of an hour of the period. Perhaps a process with a wrong
    #: clock has counted these requests in the wrong period.
    edge: int = 0

    @property
    def holds(self) -> bool:
        """Return whether the ledger has all requests in `counted`, apart from those in `edge`."""
        return self.counted - self.edge <= self.ledger


def compare(using: str, account: str, start: int, end: int) -> list[Comparison]:
    """Return a comparison for each meter, in an account's billing period from `start` to `end` (µs since 1970 UTC)."""
    usage = PeriodUsage.objects.using(using).filter(account=account)
    return compare_all(using, {account: usage}, start, end)[account]


def compare_all(
    using: str, usage: Mapping[str, Iterable[PeriodUsage]], start: int, end: int
) -> dict[str, list[Comparison]]:
    """Return the comparisons for several accounts whose billing periods have the same start and end (µs).

    `usage` has the usage totals of each account.
    """
    start, end = start // SECOND, end // SECOND
    accounts = list(usage)
    ledger = {account: _requests(rows, start, end) for account, rows in usage.items()}
    rows = ProcessTotal.objects.using(using).filter(account__in=accounts, bin__gte=start, bin__lt=end)
    # Requests of these kinds were not admitted by a limit, so the admitted requests in the ledger do not contain them.
    rows = rows.exclude(kind__in=("blocked", "exempt", "uncounted", "unreadable"))
    # The bins that begin in the first quarter of an hour of the period, and the bins that end in its last quarter of an
    # hour or later.
    at_edge = Q(bin__lt=start + BIN_SECONDS) | Q(bin__gt=end - 2 * BIN_SECONDS)
    sums = rows.values_list("account", "meter", "kind").order_by()
    # For each account, by meter and kind: the number of requests, and the part of this number at the edge.
    totals: dict[str, dict[tuple[str, str], tuple[int, int]]] = {account: {} for account in accounts}
    for account, meter, kind, requests, edge in sums.annotate(
        total=Sum("requests"), edge=Sum("requests", filter=at_edge)
    ):
        totals[account][meter, kind] = requests, edge or 0
    return {account: list(_compared(ledger[account], totals[account])) for account in accounts}


def _requests(usage: Iterable[PeriodUsage], start: int, end: int) -> Counter[str]:
    """Return how many requests the ledger has in a billing period, by meter; moments are s since 1970 UTC."""
    requests: Counter[str] = Counter()
    for row in usage:
        # Include rows whose period only overlaps the billing period: periods that overlap can be billed as one.
        if row.period < end and (row.period >= start or (row.period_end or 0) > start):
            requests[row.meter] += row.admitted_requests
    return requests


def _compared(ledger: Mapping[str, int], totals: Mapping[tuple[str, str], tuple[int, int]]) -> Iterator[Comparison]:
    for meter in sorted({*ledger, *(meter for meter, _kind in totals)}):
        counted, edge = totals.get((meter, "admitted"), (0, 0))
        unanswered, _edge = totals.get((meter, "unanswered"), (0, 0))
        unmetered, _edge = totals.get((meter, "unmetered"), (0, 0))
        yield Comparison(
            meter=meter,
            ledger=ledger.get(meter, 0),
            counted=counted,
            unanswered=unanswered,
            unmetered=unmetered,
            edge=edge,
        )


def text(compared: Iterable[Comparison]) -> str:
    """Return the text that a report prints if the ledger has fewer requests than processes counted; otherwise ""."""
    # "witness" is an old word for process totals. It stays, because digests of finalised reports contain this text.
    return "; ".join(
        f"witness {comparison.meter} processes={comparison.counted} ledger={comparison.ledger}"
        for comparison in compared
        if not comparison.holds
    )
