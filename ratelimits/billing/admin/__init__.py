"""The pages of bills in the Django admin."""

from __future__ import annotations

from ratelimits.billing.admin import adjustments, lines, past_months, plans, push, reports

__all__ = ["adjustments", "lines", "past_months", "plans", "push", "reports"]
