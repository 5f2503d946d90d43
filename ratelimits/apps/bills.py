"""Installs the floor that bills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ratelimits import erasure
from ratelimits.as_code import prices
from ratelimits.models import Report
from ratelimits.reports.terms.plan_book import included_now
from ratelimits.status import additions, billed
from ratelimits.usage.bills import bills


def install() -> None:
    """Put the functions of this floor in the places that the floors below leave for them."""
    bills.included = included_now
    bills.chains = _chains
    additions.register(billed.ADDITIONS)
    erasure.PARTS.add("ratelimits.erasure.bills.BILLS")
    prices.register()


def _chains(using: str) -> Iterator[Mapping[str, int]]:
    return Report.objects.using(using).order_by().values_list("chain", flat=True).iterator()
