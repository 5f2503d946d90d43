"""The app's pages in the Django admin."""

from __future__ import annotations

from ratelimits.admin import accounts, rules

__all__ = ["accounts", "rules"]
