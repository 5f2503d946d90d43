"""The HTTP API. With it, customers and staff read usage, quotas and reports."""

from __future__ import annotations
