"""Threshold alerts: totals of the ledger to alerts, alerts to signal, e-mail and webhook."""

from __future__ import annotations
