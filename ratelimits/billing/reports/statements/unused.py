"""Find the billing periods of all customers in the table of accounts, for files that also list those without usage."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from itertools import islice

from django.db.models import F, Min, Q

from ratelimits.algorithms.billing_periods import Period
from ratelimits.billing.models import Report
from ratelimits.billing.reports.build import CHUNK, in_order
from ratelimits.billing.reports.closing.close import shards_of
from ratelimits.models import Account, Name
from ratelimits.models.accounts.named import NamedCustomer, named, named_now
from ratelimits.models.customers import is_waiting
from ratelimits.usage.ledger.terms import Terms, TermsBook
from ratelimits.usage.periods import month_in


def candidates(
    using: str, month: str, customer: NamedCustomer | None
) -> Iterator[tuple[NamedCustomer, list[int], Period, Terms]]:
    """Yield each customer with its shards, its billing period, and its terms.

    The billing period is that of the month, by the current terms. The customers are sorted by account. A customer whose
    account was added after the end of this period is left out, and one with a final report of the month, and one whom
    no text names now.
    """
    unread, book = _with_row(using, customer), TermsBook(using)
    while chunk := list(islice(unread, CHUNK)):
        # A customer with several rows has the account of one of them.
        by_name = {name: one for name, one in named_now(using, chunk).items() if name == one.account}
        terms_of, added = book.of_customers(by_name.values()), _added(using, by_name.values())
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
            if period.label == month and added.get(one.token, 0) < period.end and one.token not in closed:
                yield one, shards[one.token], period, terms


def _with_row(using: str, customer: NamedCustomer | None) -> Iterator[str]:
    """Yield the accounts of customers who have a row in the table of accounts, sorted. Some have none of these rows."""
    rows = Account.objects.using(using).annotate(account=F("identifier"))
    if customer is not None:
        return iter([customer.account] if rows.filter(identifier__in=_texts(customer)).exists() else [])
    names = rows.order_by(*in_order(using, "account")).values_list("identifier", flat=True)
    unread = (name for name in names.iterator(chunk_size=CHUNK) if not is_waiting(name))
    return heapq.merge(unread, sorted(_under_another_text(using)))


def _under_another_text(using: str) -> Iterator[str]:
    """Yield the accounts without a row whose customer has a row under another text."""
    # Whoever has several texts has one that was given to it.
    given = Name.objects.using(using).filter(~Q(since=0, counter=0), until=None).values_list("customer", flat=True)
    several = [one for one in named(using, set(given)) if len(_texts(one)) > 1]
    for first in range(0, len(several), CHUNK):
        chunk = several[first : first + CHUNK]
        rows = Account.objects.using(using).filter(identifier__in={text for one in chunk for text in _texts(one)})
        texts = set(rows.values_list("identifier", flat=True))
        yield from (one.account for one in chunk if one.account not in texts and not texts.isdisjoint(_texts(one)))


def _texts(customer: NamedCustomer) -> list[str]:
    return [name.text for name in customer.names if name.until is None]


def _added(using: str, customers: Collection[NamedCustomer]) -> dict[str, int]:
    """Return the moment (µs since 1970 UTC) at which each customer got a row in the table of accounts, by token.

    Leave out customers whose rows have no history.
    """
    token_of = {one.pk: one.token for one in customers if one.pk is not None}
    records = Account.history.using(using).filter(customer__in=token_of).order_by()
    return {token_of[pk]: made for pk, made in records.values_list("customer").annotate(made=Min("since"))}
