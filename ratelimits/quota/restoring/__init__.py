"""Restore the counts of rules that Redis does not have, or has lost."""

from __future__ import annotations
