"""The algorithms with their parameters, and the calendar. This package does no I/O. Any other package can import it."""

from __future__ import annotations
