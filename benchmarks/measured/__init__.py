"""The code that the benchmarks measure: this app, other packages, and the shortest possible times."""

from __future__ import annotations
