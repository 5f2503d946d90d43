"""The algorithms with their parameters, and the calendar. They do no I/O, and all other packages may use them."""

from __future__ import annotations
