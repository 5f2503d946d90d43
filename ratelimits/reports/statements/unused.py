"""Accounts that a month's report would say nothing of: for whoever wants a line of each, used or not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from django.db.models import F, Min

from ratelimits.models import Account
from ratelimits.reports.build import CHUNK, Group, in_order
from ratelimits.reports.closing.close import home_shard
from ratelimits.reports.periods import SECOND, Period, month_in, period_at, starts_in
from ratelimits.reports.terms import Terms, TermsBook


def candidates(using: str, month: str, account: str | None) -> Iterator[tuple[Group, Period, Terms]]:
    """Give each account that there is with its period that starts in the month, in order, as a group without usage.

    Left out are accounts that were made after that period's end. Terms are those of today.
    """
    accounts = Account.objects.using(using).annotate(account=F("identifier"))
    if account is not None:
        accounts = accounts.filter(identifier=account)
    names = accounts.order_by(*in_order(using, "account")).values_list("identifier", flat=True)
    rest = names.iterator(chunk_size=CHUNK)
    book = TermsBook(using)
    while chunk := list(islice(rest, CHUNK)):
        terms, made = book.of(chunk), _made(using, chunk)
        for name in chunk:
            held = terms[name]
            _start, following = month_in(month, held.timezone)
            try:
                period = held.period(following - 1)
            except ValueError:  # its time zone is no more
                period = period_at("UTC", None, following - 1, held.kept)
            if starts_in(month, period.start, held.timezone) and made.get(name, 0) < period.end:
                group = {"account": name, "period": period.start // SECOND, "first_shard": home_shard(name)}
                yield group, period, held


def _made(using: str, names: list[str]) -> dict[str, int]:
    """Since when (µs since 1970 UTC) each account is known, of those that have a history."""
    records = Account.history.using(using).filter(identifier__in=names).order_by()
    return dict(records.values_list("identifier").annotate(made=Min("since")))
