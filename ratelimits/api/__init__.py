"""The HTTP API with which customers and staff read usage and quotas."""

from __future__ import annotations
