"""The HTTP API: what customers and staff ask of the ledger and of the quotas in force."""

from __future__ import annotations
