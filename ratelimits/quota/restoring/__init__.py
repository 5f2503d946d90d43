"""Restore the counts of rules that Redis has not, or not any more."""

from __future__ import annotations
