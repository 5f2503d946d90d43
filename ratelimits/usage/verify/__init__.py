"""Verification of the ledger: each line, each sum, each link of its chains, and each shard's watermark."""

from __future__ import annotations
