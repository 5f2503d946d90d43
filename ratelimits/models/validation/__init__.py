"""Check that a rule or an override is valid, alone and together with other rows."""

from __future__ import annotations
