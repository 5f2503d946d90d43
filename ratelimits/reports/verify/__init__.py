"""Verification that reports equal what the ledger gives."""

from __future__ import annotations
