"""The path of usage from Redis to the ledger: batches are sealed, fenced (the server has fsynced), and drained."""

from __future__ import annotations
