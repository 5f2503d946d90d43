"""The parts of `manage.py demo`: processes, seed rows, traffic, and the comparison with the ledger."""

from __future__ import annotations
