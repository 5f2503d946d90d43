"""The proof that reports say what the ledger says, with what could not be seen."""

from __future__ import annotations
