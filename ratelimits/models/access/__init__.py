"""Blocks and allows. A block refuses all requests of a key or network; an allow exempts these requests from all rules."""

from __future__ import annotations
