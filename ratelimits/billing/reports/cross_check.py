"""Compare the ledger with the process totals.

The processes together must never have counted more admitted requests than the ledger has. (Requests at the edge of a
period are not compared, see `Comparison.edge`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Q, Sum
from django.db.models.functions import Coalesce

from ratelimits.algorithms.billing_periods import Span
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.models import PeriodUsage, ProcessTotal
from ratelimits.usage.periods import SECOND, in_spans, within

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


def compare(using: str, customer: NamedCustomer, start: int, end: int) -> list[Comparison]:
    """Return a comparison for each meter, in a customer's billing period from `start` to `end` (µs since 1970 UTC)."""
    usage = PeriodUsage.objects.using(using).filter(customer=customer.pk)
    return compare_all(using, {customer: usage}, start, end)[customer.token]


def compare_all(
    using: str, usage: Mapping[NamedCustomer, Iterable[PeriodUsage]], start: int, end: int
) -> dict[str, list[Comparison]]:
    """Return the comparisons for several customers with a billing period from `start` to `end` (µs since 1970 UTC).

    `usage` has the usage totals of each customer. The keys of the result are the tokens of the customers.
    """
    compared: dict[str, list[Comparison]] = {}
    # Customers with one text are compared together. By text:
    alone: dict[str, NamedCustomer] = {}
    for customer in usage:
        text = customer.only_text(start, end)
        if text is None:
            spans = customer.spans(start, end)
            totals = _totals(using, in_spans(spans), [(span.start, span.end) for span in spans], ("meter", "kind"))
            counted = {(meter, kind): counts for meter, kind, *counts in totals}
            compared[customer.token] = _compared(_requests(usage[customer], start // SECOND), counted)
        else:
            alone[text] = customer
    by_text: dict[str, dict[tuple[str, str], list[int]]] = {text: {} for text in alone}
    condition = within(start, end) & Q(account__in=list(alone))
    if alone:
        for text, meter, kind, *counts in _totals(using, condition, [(start, end)], ("account", "meter", "kind")):
            by_text[text][meter, kind] = counts
    for text, customer in alone.items():
        compared[customer.token] = _compared(_requests(usage[customer], start // SECOND), by_text[text])
    return compared


def _totals(using: str, condition: Q, spans: Iterable[Span], columns: tuple[str, ...]) -> Iterable[Any]:
    """Return rows with the columns, the number of requests, and the part of this number at the edges of the spans."""
    rows = ProcessTotal.objects.using(using).filter(condition)
    # Requests of these kinds were not admitted by a limit, so the admitted requests in the ledger do not contain them.
    rows = rows.exclude(kind__in=("blocked", "exempt", "uncounted", "unreadable", "undecided"))
    # The bins that begin in the first quarter of an hour of a span, and the bins that end in its last quarter or later.
    edges = [edge for start, end in spans for edge in ((start, start + _BIN), (end - 2 * _BIN + SECOND, end))]
    at_edge = reduce(or_, (within(*edge) for edge in edges), Q(pk__in=()))
    total, edge = Sum("requests"), Coalesce(Sum("requests", filter=at_edge), 0)
    return rows.values_list(*columns).order_by().annotate(total=total, edge=edge)


def _requests(usage: Iterable[PeriodUsage], start: int) -> Counter[str]:
    """Return how many requests the ledger has in a billing period, by meter. `start` is in s since 1970 UTC."""
    requests: Counter[str] = Counter()
    for row in usage:
        if row.period == start:
            requests[row.meter] += row.admitted_requests
    return requests


def _compared(ledger: Mapping[str, int], totals: Mapping[tuple[str, str], Sequence[int]]) -> list[Comparison]:
    compared = []
    for meter in sorted({*ledger, *(meter for meter, _kind in totals)}):
        counted, edge = totals.get((meter, "admitted"), (0, 0))
        unanswered, _edge = totals.get((meter, "unanswered"), (0, 0))
        unmetered, _edge = totals.get((meter, "unmetered"), (0, 0))
        compared.append(
            Comparison(
                meter=meter,
                ledger=ledger.get(meter, 0),
                counted=counted,
                unanswered=unanswered,
                unmetered=unmetered,
                edge=edge,
            )
        )
    return compared


def text(compared: Iterable[Comparison]) -> str:
    """Return the text that a report prints if the ledger has fewer requests than processes counted; otherwise ""."""
    # "witness" is an old word for process totals. It stays, because digests of finalised reports contain this text.
    return "; ".join(
        f"witness {comparison.meter} processes={comparison.counted} ledger={comparison.ledger}"
        for comparison in compared
        if not comparison.holds
    )
