"""Make usage reports from ledger lines, one for each account and billing period, and export them."""

from __future__ import annotations
