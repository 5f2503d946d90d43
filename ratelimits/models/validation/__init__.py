"""Validation of rules and overrides against other rows, with a message at the field that is wrong."""

from __future__ import annotations
