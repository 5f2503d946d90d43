"""Rows that were written without the app's models, and how they get their version and history."""

from __future__ import annotations
