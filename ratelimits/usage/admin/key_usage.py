"""The inspector's table of an account's usage."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.models.accounts.named import named_now
from ratelimits.moments import when
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.ledger.terms import MeterUse, TermsBook, present_usage


def shown_usage(account: str, now: float) -> dict[str, Any]:
    """Return an account's usage in the current billing period, and the quantities that the account's plan includes."""
    customer = named_now(conf.DATABASE, [account])[account]
    terms = TermsBook(conf.DATABASE).of_customers([customer])[customer.token]
    period, meters = present_usage(conf.DATABASE, customer, terms, int(now * 1_000_000))
    return {
        "start": when(period.start),
        "end": when(period.end),
        "plan": terms.plan,
        # Without bills nobody knows what the plan includes, so the page has no columns about it.
        "bills": bills.included is not None,
        "meters": [_meter_texts(use) for use in meters],
    }


def _meter_texts(use: MeterUse) -> tuple[str, str, str, str]:
    """Return texts about the use of a meter: the unit, the used units, the included units, and what is left of them.

    If more units were used than are included, the last text has the number of units above the included quantity.
    """
    unit, used = conf.UNITS.get(use.meter, use.meter), f"{use.used:,}"
    if not use.included:
        return unit, used, "–", "–"
    remaining = _("%s beyond") % f"{use.overage:,}" if use.overage else _("%s left") % f"{use.remaining:,}"
    return unit, used, f"{use.included:,}", remaining
