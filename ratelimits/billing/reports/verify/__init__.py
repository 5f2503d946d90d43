"""Verify reports: compute each one again from the ledger, and compare it with the stored report."""

from __future__ import annotations
