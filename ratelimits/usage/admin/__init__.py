"""The pages of usage in the Django admin."""

from __future__ import annotations

from ratelimits.status.additions import register
from ratelimits.usage.admin import additions, alerts, erasing, gaps, ledger, quarantine, shadow

__all__ = ["alerts", "erasing", "gaps", "ledger", "quarantine", "shadow"]

register(additions.ADDITIONS)
