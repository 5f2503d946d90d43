"""Close billing periods: write a report when the usage is complete, and a new version of the report for a change."""

from __future__ import annotations
