"""Totals of ledger lines, recorded requests, and the last run of each task."""

from __future__ import annotations
