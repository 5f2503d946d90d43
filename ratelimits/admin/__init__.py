"""The app's pages in the Django admin."""

from __future__ import annotations

from ratelimits.admin import accounts, alerts, reports, rules, usage

__all__ = ["accounts", "alerts", "reports", "rules", "usage"]
