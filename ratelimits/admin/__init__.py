"""The app's pages in the Django admin."""

from __future__ import annotations

from ratelimits.admin import accounts, alerts, push, reports, rules, usage

__all__ = ["accounts", "alerts", "push", "reports", "rules", "usage"]
