"""Benchmarks of callers that wait for their turn."""

from __future__ import annotations
