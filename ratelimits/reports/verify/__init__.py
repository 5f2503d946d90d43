"""Verification of reports: each is computed again from the ledger and compared with the stored report."""

from __future__ import annotations
