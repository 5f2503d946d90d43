"""Compare the ledger with the process totals.

The processes together must never have counted more admitted requests than the ledger has. (Requests at the edge of a
period are not compared, see `Comparison.edge`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from django.db.models import Sum

from ratelimits.algorithms.billing_periods import Span
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import PeriodUsage, ProcessTotal
from ratelimits.models.periods import timelines
from ratelimits.reports.periods import SECOND, in_spans

#: Length of a bin of usage, in µs.
_BIN = BIN_SECONDS * SECOND


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
    spans = timelines(using, [account])[account].spans(start, end)
    return compare_all(using, {account: usage}, start, spans)[account]


def compare_all(
    using: str, usage: Mapping[str, Iterable[PeriodUsage]], start: int, spans: Collection[Span]
) -> dict[str, list[Comparison]]:
    """Return the comparisons for several accounts with a billing period from `start` on (µs since 1970 UTC).

    `usage` has the usage totals of each account. `spans` are the spans whose usage belongs to the period, usually one
    from its start to its end (see `DatedTimeline.spans`).
    """
    accounts = list(usage)
    ledger = {account: _requests(rows, start // SECOND) for account, rows in usage.items()}
    rows = ProcessTotal.objects.using(using).filter(in_spans(spans), account__in=accounts)
    # Requests of these kinds were not admitted by a limit, so the admitted requests in the ledger do not contain them.
    rows = rows.exclude(kind__in=("blocked", "exempt", "uncounted", "unreadable", "undecided"))
    # The bins that begin in the first quarter of an hour of a span, and the bins that end in its last quarter or later.
    at_edge = in_spans(edge for start, end in spans for edge in ((start, start + _BIN), (end - 2 * _BIN + SECOND, end)))
    sums = rows.values_list("account", "meter", "kind").order_by()
    # For each account, by meter and kind: the number of requests, and the part of this number at the edge.
    totals: dict[str, dict[tuple[str, str], tuple[int, int]]] = {account: {} for account in accounts}
    for account, meter, kind, requests, edge in sums.annotate(
        total=Sum("requests"), edge=Sum("requests", filter=at_edge)
    ):
        totals[account][meter, kind] = requests, edge or 0
    return {account: list(_compared(ledger[account], totals[account])) for account in accounts}


def _requests(usage: Iterable[PeriodUsage], start: int) -> Counter[str]:
    """Return how many requests the ledger has in a billing period, by meter. `start` is in s since 1970 UTC."""
    requests: Counter[str] = Counter()
    for row in usage:
        if row.period == start:
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
