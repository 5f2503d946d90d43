"""Threshold alerts: raised from the totals of the ledger, and sent by signal, e-mail and webhook."""

from __future__ import annotations
