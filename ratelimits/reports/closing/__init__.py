"""Close billing periods: write a report when the usage is complete, and a new version of it for each later change."""

from __future__ import annotations
