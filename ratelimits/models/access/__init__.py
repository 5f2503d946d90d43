"""Blocks and allows: rows that refuse or exempt a key or a network before any rule is looked at."""

from __future__ import annotations
