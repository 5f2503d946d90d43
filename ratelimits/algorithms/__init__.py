"""The algorithms with their parameters, and the calendar. This package does no I/O. All other packages may use it."""

from __future__ import annotations
