"""Answer a request: which rules apply, what the engine decides, and what holds without the engine."""

from __future__ import annotations
