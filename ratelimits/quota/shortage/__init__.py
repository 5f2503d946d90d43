"""Save memory in Redis while it is short."""

from __future__ import annotations
