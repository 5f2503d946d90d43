"""Adjustments that no report has yet."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.db.models import QuerySet

from ratelimits.models import Adjustment, Report
from ratelimits.models.ledger import moment
from ratelimits.reports.periods import SECOND


def start_of(adjustment: Adjustment) -> int:
    """Return the µs since 1970 UTC at which the period of an adjustment starts."""
    return int(adjustment.period_start.timestamp()) * SECOND


def unreported(using: str, **about: Any) -> QuerySet[Adjustment]:
    """Return the adjustments that a closing puts on reports, in the order in which it does."""
    return Adjustment.objects.using(using).filter(report=None, **about).order_by("created_at", "reference")


def of_open_periods(using: str, start: int, end: int, **about: Any) -> dict[tuple[str, int], list[Adjustment]]:
    """Return those of periods without a report that start between two moments (µs since 1970 UTC).

    By account and start of the period (s since 1970 UTC), in that order.
    """
    found: dict[tuple[str, int], list[Adjustment]] = defaultdict(list)
    for adjustment in unreported(using, **about, period_start__gte=moment(start), period_start__lt=moment(end)):
        found[adjustment.account, start_of(adjustment) // SECOND].append(adjustment)
    reports = Report.objects.using(using).filter(account__in={account for account, _start in found})
    closed = reports.filter(period_start__gte=start, period_start__lt=end).values_list("account", "period_start")
    for account, period_start in closed if found else ():
        found.pop((account, period_start // SECOND), None)
    return dict(sorted(found.items()))
