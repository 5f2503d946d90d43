"""Usage on its way from Redis to the ledger: open batch, sealed batch, fence, ledger."""

from __future__ import annotations
