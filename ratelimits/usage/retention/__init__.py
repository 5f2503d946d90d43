"""Retention of batches in the ledger: old batches are joined, and later moved to archive files."""

from __future__ import annotations
