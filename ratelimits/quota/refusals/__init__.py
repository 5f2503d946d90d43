"""Refusals that this process repeats or makes without asking Redis, and their counts."""

from __future__ import annotations
