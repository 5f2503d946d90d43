"""The algorithms with their parameters, and the calendar: pure values that all other rooms share."""

from __future__ import annotations
