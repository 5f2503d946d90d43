"""Find the billing periods of all accounts, for files that also list accounts without usage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from django.db.models import F, Min

from ratelimits.algorithms.billing_periods import Period
from ratelimits.models import Account, Customer
from ratelimits.models.customers import present
from ratelimits.reports.build import CHUNK, Group, in_order
from ratelimits.reports.closing.close import home_shard
from ratelimits.reports.periods import SECOND, month_in
from ratelimits.reports.terms import Terms, TermsBook


def candidates(using: str, month: str, account: str | None) -> Iterator[tuple[Group, Customer, Period, Terms]]:
    """Yield four items for each account: a group without usage, its customer, its billing period, and its terms.

    The billing period is that of the month, by the current terms. The accounts are sorted by identifier.
    An account that was added after the end of this period is left out.
    """
    accounts = Account.objects.using(using).annotate(account=F("identifier"))
    if account is not None:
        accounts = accounts.filter(identifier=account)
    names = accounts.order_by(*in_order(using, "account")).values_list("identifier", flat=True)
    unread = names.iterator(chunk_size=CHUNK)
    book = TermsBook(using)
    while chunk := list(islice(unread, CHUNK)):
        by_name, added, customers = book.of(chunk), _added(using, chunk), present(using, chunk)
        for name in chunk:
            terms = by_name[name]
            _start, following = month_in(month, terms.timezone)
            period = terms.period(following - 1)
            if period.label > month:  # The account's periods do not end with the month.
                period = terms.period(period.start - 1)
            if period.label == month and added.get(name, 0) < period.end:
                group = {"account": name, "period": period.start // SECOND, "first_shard": home_shard(name)}
                yield group, customers[name], period, terms


def _added(using: str, names: list[str]) -> dict[str, int]:
    """Return the moment (µs since 1970 UTC) at which each account was added. Leave out accounts without a history."""
    records = Account.history.using(using).filter(identifier__in=names).order_by()
    return dict(records.values_list("identifier").annotate(made=Min("since")))
