"""Groups of fields of a rule that belong together."""

from __future__ import annotations
