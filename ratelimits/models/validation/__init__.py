"""Validation of rules and overrides together with other rows. Each message is at the field that it is about."""

from __future__ import annotations
