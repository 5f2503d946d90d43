"""Retention of batches in the ledger: they are joined, and later moved to archive files."""

from __future__ import annotations
