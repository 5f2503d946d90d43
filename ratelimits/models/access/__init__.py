"""Blocks refuse all requests of a key or network. Allows exempt all requests of a key or network from all rules."""

from __future__ import annotations
