"""Rows that were written past the app: adopted into versions and history."""

from __future__ import annotations
