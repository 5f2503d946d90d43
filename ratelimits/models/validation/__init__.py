"""Check that a rule or an override is valid, alone and together with other rows. Each message belongs to a field."""

from __future__ import annotations
