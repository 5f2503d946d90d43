"""Verification of the ledger: its lines, its sums, the links of its digest chains, and the watermarks of shards."""

from __future__ import annotations
