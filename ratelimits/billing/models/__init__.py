"""The tables of prices, corrections, reports and pushed lines."""

from __future__ import annotations

import ratelimits.billing.models.installed  # noqa: F401  (raises an error if the app is not installed)
from ratelimits.billing.models.adjustments import Adjustment
from ratelimits.billing.models.prices import PlanPrice
from ratelimits.billing.models.push import PushDelivery, PushedReport, PushReceiver
from ratelimits.billing.models.reports import Report, ReportLine

__all__ = [
    "Adjustment",
    "PlanPrice",
    "PushDelivery",
    "PushReceiver",
    "PushedReport",
    "Report",
    "ReportLine",
]
