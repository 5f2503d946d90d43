"""Model fields that several tables share, their valid values, and the sentences that describe rules."""

from __future__ import annotations
