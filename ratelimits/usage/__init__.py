"""The path of usage from Redis to the ledger: open batch, sealed batch, fence, ledger."""

from __future__ import annotations
