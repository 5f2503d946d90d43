"""What the page of the status is made from: totals of short spans, and when the tasks last ran."""

from __future__ import annotations
