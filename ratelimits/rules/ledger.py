"""Read how much usage of a key the ledger has. Under some rules, the count of a key starts at this usage, not at 0."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import Q, QuerySet

from ratelimits.algorithms.parsing import MAX_PERMITS, MICROSECONDS
from ratelimits.conf import conf
from ratelimits.models.ledger import Line
from ratelimits.models.ledger.sums import ExactSum


class LedgerQuery(NamedTuple):
    """The usage to read: of one meter, in one span of time, of a key or an account.

    meter          the meter
    start, end     the span, in µs since 1970 UTC
    account        only usage of this account; "" for all accounts
    account_start  if the key does not matter: only usage of the account from this moment on, in µs since 1970 UTC
    key            only usage of this user or API key; "" for all keys
    is_either      whether usage of the account counts with any key, and usage of the key with any account
    """

    meter: str
    start: int
    end: int
    account: str = ""
    key: str = ""
    is_either: bool = False
    account_start: int = 0


def read(query: LedgerQuery) -> int:
    """Return the number of units that were admitted and not refunded, at least 0."""
    sums = lines_of(query).aggregate(admitted=ExactSum("admitted_units"), refunded=ExactSum("refunded_units"))
    # No capacity is larger than MAX_PERMITS. The script, which counts in doubles, needs to know no more than that.
    return min(max((sums["admitted"] or 0) - (sums["refunded"] or 0), 0), MAX_PERMITS + 1)


def lines_of(query: LedgerQuery) -> QuerySet[Line]:
    """Return the lines of the ledger that a query finds. An index finds them by the key or the account, and the bin."""
    bins = Q(bin__gte=query.start // MICROSECONDS, bin__lt=query.end // MICROSECONDS)
    of_key, of_account = Q(key=query.key) & bins, Q(account=query.account) & bins
    if query.account_start > query.start:
        of_account &= Q(bin__gte=query.account_start // MICROSECONDS)
    if query.is_either:
        subject = of_account | of_key
    elif query.key:
        subject = of_key & of_account if query.account else of_key
    else:
        subject = of_account
    return Line.objects.using(conf.DATABASE).filter(subject, meter=query.meter)
