"""Tables for the status page: totals of short spans of time, and the last run of each task."""

from __future__ import annotations
