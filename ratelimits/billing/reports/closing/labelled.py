"""Find the open billing periods of a month: they have usage or adjustments that are on no report.

A billing period belongs to the month of its last moment, in its own time zone (`Period.label`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import NamedTuple

from django.db.models import F, Q

from ratelimits.algorithms.billing_periods import Period
from ratelimits.billing.models import Adjustment
from ratelimits.billing.reports.adjusting import start_of, unreported
from ratelimits.billing.reports.closing.close import in_account_order
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.billing.reports.closing.customer_periods import CustomerPeriods, MissingPeriodError
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.models.customers import customer_at, names_of
from ratelimits.moments import moment
from ratelimits.usage.models import Line, PeriodUsage, ShardState
from ratelimits.usage.periods import SECOND, in_spans, span_of, within


class WithUsage(NamedTuple):
    """Customers with usage: `pks` are their primary keys. `texts` are account texts that name nobody yet.

    `bins` has the bins (s since 1970 UTC) with usage that is not in the totals yet: for a customer by its primary key,
    and for such a text by the text itself.
    """

    pks: set[int]
    texts: set[str]
    bins: Mapping[int | str, set[int]]

    def bins_of(self, customer: NamedCustomer) -> set[int]:
        """Return the bins with usage of a customer that is not in the totals yet."""
        return self.bins.get(customer.account if customer.pk is None else customer.pk, set())

    def __bool__(self) -> bool:
        return bool(self.pks or self.texts)


def with_untallied(using: str, start: int, end: int, customer: NamedCustomer | None = None) -> WithUsage:
    """Return the customers with usage that is not in the totals yet, from `start` to `end` (µs since 1970 UTC).

    With `customer`, look only at this customer.
    """
    states = ShardState.objects.using(using).filter(position__gt=F("tallied")).values_list("shard", "tallied")
    untallied = [Q(batch__shard=shard, batch__position__gt=tallied) for shard, tallied in states]
    if not untallied:
        return WithUsage(set(), set(), {})
    condition = within(start, end) if customer is None else in_spans(customer.spans(start, end))
    lines = Line.objects.using(using).filter(reduce(or_, untallied), condition)
    uses = list(lines.order_by().values_list("account", "bin").distinct())
    names = names_of(using, {text for text, _bin in uses})
    bins: dict[int | str, set[int]] = {}
    for text, bin_ in uses:
        pk = customer_at(names[text], bin_) if text in names else None
        bins.setdefault(text if pk is None else pk, set()).add(bin_)
    pks = {subject for subject in bins if isinstance(subject, int)}
    return WithUsage(pks, {subject for subject in bins if isinstance(subject, str)}, bins)


def with_open_periods(using: str, month: str, customer: NamedCustomer | None = None) -> set[int]:
    """Return the customers (their primary keys) with usage or adjustments that are on no report, perhaps of a month.

    Leave out customers whose usage is not in the totals yet. With `customer`, look only at this customer.
    """
    start, end = span_of(month)
    of = {} if customer is None else {"customer": customer.pk}
    within_span = {"period__gte": start // SECOND, "period__lt": end // SECOND}
    usage = PeriodUsage.objects.using(using).filter(covered=None, **within_span, **of)
    adjusted = unreported(using, period_start__gte=moment(start), period_start__lt=moment(end), **of)
    return {pk for rows in (usage, adjusted) for pk in rows.order_by().values_list("customer", flat=True)}


def open_in(using: str, month: str) -> Iterator[tuple[NamedCustomer, Period]]:
    """Yield the customer and the period of each open billing period of a month like "2026-11", sorted by account.

    Leave out customers whose periods are not in the table of billing periods: `open_periods` names them.
    """
    for customer, periods in _periods_of(using, with_open_periods(using, month)):
        with suppress(MissingPeriodError):
            yield from ((customer, period) for period in periods.open() if period.label == month)


def adjustments_of(using: str, month: str) -> list[int]:
    """Return the primary keys of the adjustments of a month like "2026-11".

    An adjustment on a report belongs to the month of the report. Any other adjustment belongs to the month of its
    billing period, even if it was refused.
    """
    start, end = span_of(month)
    rows = Adjustment.objects.using(using)
    reported = set(rows.filter(report__label=month).values_list("pk", flat=True))
    without_report = rows.filter(report=None, period_start__gte=moment(start), period_start__lt=moment(end))
    by_customer: dict[int | None, list[Adjustment]] = {}
    for adjustment in without_report:
        by_customer.setdefault(adjustment.customer_id, []).append(adjustment)
    for customer, periods in _periods_of(using, {pk for pk in by_customer if pk is not None}):
        reported |= {row.pk for row in by_customer[customer.pk] if periods.at(start_of(row)).label == month}
    return sorted(reported)


def _periods_of(using: str, pks: Collection[int]) -> Iterator[tuple[NamedCustomer, CustomerPeriods]]:
    """Yield the billing periods of each customer. The data of many customers are read together."""
    for chunk in in_account_order(using, pks):
        # The last argument has the locked shards. There are none, because nothing is written here.
        data = ClosingData(using, chunk, {})
        yield from ((customer, CustomerPeriods(data, customer)) for customer in chunk)
