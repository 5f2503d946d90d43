"""What the floor that counts usage does at a request: counts in this process, and counts restored from the ledger."""

from __future__ import annotations
