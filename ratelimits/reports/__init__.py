"""Usage reports: statements of billing periods, made from ledger lines, and their exports."""

from __future__ import annotations
