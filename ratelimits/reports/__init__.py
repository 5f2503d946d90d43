"""Usage reports: ledger lines to statements of billing periods, and their exports."""

from __future__ import annotations
