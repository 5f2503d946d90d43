"""What becomes of batches in the ledger: they are joined, and later archived."""

from __future__ import annotations
