"""Install what the floor of bills adds to the floors below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ratelimits.conf import conf
from ratelimits.models import Report
from ratelimits.reports.terms.plan_book import included_now
from ratelimits.usage.bills import bills


def install() -> None:
    """Let the work with usage ask for bills. Call this when Django starts."""
    bills.included = included_now
    bills.chains = _chains
    bills.intervals = _intervals


def _chains(using: str) -> Iterator[Mapping[str, int]]:
    return Report.objects.using(using).order_by().values_list("chain", flat=True).iterator()


def _intervals() -> Mapping[str, float]:
    intervals = {"ratelimits.finalise": conf.FINALISE_INTERVAL}
    if conf.PUSH:
        intervals["ratelimits.push"] = conf.PUSH_INTERVAL
    return intervals
