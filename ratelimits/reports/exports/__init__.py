"""Report rows to files: streamed, so that a report of any size is written in bounded memory."""

from __future__ import annotations

from ratelimits.reports.exports.csv import TEXT_FORMATS

__all__ = ["TEXT_FORMATS"]
