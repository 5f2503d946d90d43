"""Make a usage report for each account and billing period from the lines of the ledger. Export reports."""

from __future__ import annotations
