"""Say before an edit of plans or accounts which bills of past months, which still run somewhere, it changes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from time import time_ns

from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.admin.operate.confirming import AsksBeforeSaving, Consequences
from ratelimits.algorithms.billing_periods import month_of
from ratelimits.billing.reports.statements.still_running import StillRunning, may_run, still_running, with_amounts
from ratelimits.conf import conf
from ratelimits.usage.admin.ledger import month_text

#: Maximum number of periods that the page lists with their amounts.
_MAX_LISTED = 20


def compare_bills(accounts: Collection[str]) -> Callable[[Collection[str]], Consequences | None] | None:
    """Return a function that takes the accounts after an edit, and says what the edit changes; None if nothing.

    Return None instead of this function while no past month still runs anywhere.

    Bills of a month which people think of as past, but which still runs, are compared, with their amounts. `accounts`
    are the accounts before the edit.
    """
    now = time_ns() // 1000
    # A month is past for people if it is past in UTC or in their own time zone.
    month = max(month_of(now, "UTC"), f"{moments.local(moments.now()):%Y-%m}")
    if not may_run(now, month):
        return None
    before = {(each.account, each.period): each for each in _running(accounts, now, month)}

    def compared(accounts: Collection[str]) -> Consequences | None:
        after = {(each.account, each.period): each for each in _running(accounts, now, month)}
        lasts = [max(account for account, _ in side) for side in (before, after) if len(side) > _MAX_LISTED]
        rows = []
        for account, period in sorted(before.keys() | after.keys()):
            if lasts and account > min(lasts):
                break  # One of the two sides ends here, so it has perhaps no amount of a further account.
            owed = [each.owed if (each := state.get((account, period))) else "" for state in (before, after)]
            if owed[0] != owed[1]:
                end = f"{period.local_end()} {period.timezone}"
                rows.append((account, month_text(period.label), end, owed[0] or "–", owed[1] or "–"))
        warnings = []
        if rows:
            warnings.append(
                _("This edit changes bills of a past month, which still runs in the time zones of these accounts.")
            )
        if lasts:
            # The bills of further accounts are not compared, so nobody knows whether the edit changes them.
            warnings.append(
                _("More than %(count)s accounts are still in a past month. The bills of the others were not compared.")
                % {"count": _MAX_LISTED}
            )
        if not warnings:
            return None
        sentence = _(
            "To change only the next billing period, save after these moments, or choose the next plan of an"
            " account on its page."
        )
        heads = [_("account"), _("period"), _("ends"), _("overage so far, before"), _("overage so far, after")]
        return Consequences("", [sentence], warnings, heads, rows)

    return compared


def _running(accounts: Collection[str], now: int, month: str) -> list[StillRunning]:
    """Return the first periods that still run, with amounts; one more than are listed if there are more."""
    running = list(islice(still_running(conf.DATABASE, accounts, now, month), _MAX_LISTED + 1))
    return with_amounts(conf.DATABASE, running)


AsksBeforeSaving.compare_bills = staticmethod(compare_bills)
