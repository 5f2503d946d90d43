"""Check that a rule or an override is valid, by itself and beside the other rows. Each message is at its field."""

from __future__ import annotations
