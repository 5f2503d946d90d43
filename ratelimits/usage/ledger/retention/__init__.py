"""Joining old batches of the ledger, and moving them to archive files."""

from __future__ import annotations
