"""The path of usage from Redis to the ledger.

Batches are sealed (ended and numbered) and fenced (the server has fsynced them). Then the drain writes them to the
ledger.
"""

from __future__ import annotations
