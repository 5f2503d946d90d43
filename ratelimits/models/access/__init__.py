"""Blocks and allows. A block refuses all requests of a key or a network; an allow exempts them from all rules."""

from __future__ import annotations
