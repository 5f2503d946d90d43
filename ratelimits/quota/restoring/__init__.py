"""Restore counts of rules if Redis does not have them, or has lost them."""

from __future__ import annotations
