"""Code for all benchmarks: servers, timing, settings and output."""

from __future__ import annotations
