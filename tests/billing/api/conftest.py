from __future__ import annotations

from tests.usage.api.conftest import _at_once, customer, staff

__all__ = ["_at_once", "customer", "staff"]
