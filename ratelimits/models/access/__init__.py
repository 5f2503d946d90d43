"""Blocks and allows: rows that refuse or exempt a key or a network, before any rule is decided."""

from __future__ import annotations
