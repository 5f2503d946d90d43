"""The proof that the ledger is whole: each line, each sum and each link of its chains."""

from __future__ import annotations
