"""The app's pages in the Django admin."""

from __future__ import annotations

from ratelimits.admin import accounts, adjustments, alerts, push, reports, rules, usage

__all__ = ["accounts", "adjustments", "alerts", "push", "reports", "rules", "usage"]
