"""A request in, an answer out: which rules apply, what the engine decides, and what holds without it."""

from __future__ import annotations
