"""Find billing periods of a past month that still run, because an edit of a plan or an account now changes their bills.

A month ends at another moment in each time zone. So at half past midnight on 1 February in UTC, an account in New York
still has its January, and a new price or plan applies to all of this January.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ratelimits.algorithms.billing_periods import Period, month_of
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.statements.charges import charges
from ratelimits.usage.ledger.terms import TermsBook
from ratelimits.usage.periods import SECOND

#: In no time zone does a month last longer than this time (µs) after its end in UTC.
_WESTERNMOST = 12 * 3600 * SECOND
#: Maximum number of accounts whose terms are read together.
_CHUNK = 1000


@dataclass(frozen=True, slots=True)
class StillRunning:
    """A billing period of a past month that still runs.

    `owed` says what is billed so far: the overage, and the amount if the plan has prices ("3 requests, 0.30 EUR").
    """

    account: str
    period: Period
    owed: str = ""


def may_run(now: int, month: str) -> bool:
    """Return whether a month before `month` still runs in some time zone at the moment `now` (µs since 1970 UTC)."""
    return month_of(now - _WESTERNMOST, "UTC") < month


def still_running(using: str, accounts: Iterable[str], now: int, month: str) -> Iterator[StillRunning]:
    """Yield the periods of these accounts that run at `now` and belong to a month before `month`, sorted by account.

    `with_amounts` adds what is billed. If not `may_run`, there are none.
    """
    names, book = sorted(accounts), TermsBook(using)
    for first in range(0, len(names), _CHUNK):
        chunk = names[first : first + _CHUNK]
        terms = book.of(chunk)
        for name in chunk:
            period = terms[name].period(now)
            if period.label < month:
                yield StillRunning(name, period)


def with_amounts(using: str, running: Collection[StillRunning]) -> list[StillRunning]:
    """Return these periods with what is billed so far, by the terms of this moment."""
    found = []
    for each in running:
        of_month = statements(each.period.label, account=each.account, using=using)
        of_period = (one for one in of_month if one.report.period_start == each.period.start)
        overage, total = Counter[str](), ""
        for charge in charges(of_period):
            overage[charge.row.meter] += charge.row.overage_quantity
            total = f"{charge.total} {charge.currency}" if charge.currency else ""
        billed = [f"{units:,} {meter}" for meter, units in sorted(overage.items()) if units]
        found.append(replace(each, owed=", ".join([*billed, total] if total else billed)))
    return found
