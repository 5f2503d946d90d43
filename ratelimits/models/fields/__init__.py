"""Fields that tables have in common, what they may hold, and how people read them."""

from __future__ import annotations
