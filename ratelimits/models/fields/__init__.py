"""Model fields that several tables use, their valid values, and the sentences that describe rules."""

from __future__ import annotations
