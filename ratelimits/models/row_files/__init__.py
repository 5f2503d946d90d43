"""The table for the import of CSV files."""

from __future__ import annotations
