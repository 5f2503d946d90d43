"""Rate limits, quotas and usage billing for Django."""

from __future__ import annotations

__version__ = "0.1.0"
