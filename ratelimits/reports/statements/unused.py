"""Find the billing periods of all customers in the table of accounts, for files that also list those without usage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from django.db.models import F, Min

from ratelimits.algorithms.billing_periods import Period
from ratelimits.models import Account, Report
from ratelimits.models.accounts.named import NamedCustomer, named_now
from ratelimits.models.customers import is_waiting
from ratelimits.reports.build import CHUNK, in_order
from ratelimits.reports.closing.close import shards_of
from ratelimits.reports.periods import month_in
from ratelimits.reports.terms import Terms, TermsBook


def candidates(
    using: str, month: str, customer: NamedCustomer | None
) -> Iterator[tuple[NamedCustomer, list[int], Period, Terms]]:
    """Yield each customer with its shards, its billing period, and its terms.

    The billing period is that of the month, by the current terms. The customers are sorted by account. A customer whose
    account was added after the end of this period is left out, and one with a final report of the month, and one whom
    no text names now.
    """
    accounts = Account.objects.using(using).annotate(account=F("identifier"))
    if customer is not None:
        accounts = accounts.filter(identifier=customer.account)
    names = accounts.order_by(*in_order(using, "account")).values_list("identifier", flat=True)
    unread = (name for name in names.iterator(chunk_size=CHUNK) if not is_waiting(name))
    book = TermsBook(using)
    while chunk := list(islice(unread, CHUNK)):
        # A customer with several rows has the account of one of them.
        by_name = {name: one for name, one in named_now(using, chunk).items() if name == one.account}
        terms_of, added = book.of_customers(by_name.values()), _added(using, chunk)
        shards = shards_of(using, list(by_name.values()))
        reports = Report.objects.using(using).filter(
            label=month, customer__token__in=[one.token for one in by_name.values()]
        )
        closed = set(reports.values_list("customer__token", flat=True))
        for name in filter(by_name.__contains__, chunk):
            one = by_name[name]
            terms = terms_of[one.token]
            _start, following = month_in(month, terms.timezone)
            period = terms.period(following - 1)
            if period.label > month:  # The periods do not end with the month.
                period = terms.period(period.start - 1)
            if period.label == month and added.get(name, 0) < period.end and one.token not in closed:
                yield one, shards[one.token], period, terms


def _added(using: str, names: list[str]) -> dict[str, int]:
    """Return the moment (µs since 1970 UTC) at which each account was added. Leave out accounts without a history."""
    records = Account.history.using(using).filter(identifier__in=names).order_by()
    return dict(records.values_list("identifier").annotate(made=Min("since")))
