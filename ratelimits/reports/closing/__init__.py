"""Billing periods whose usage is complete become reports; what comes later, new versions."""

from __future__ import annotations
