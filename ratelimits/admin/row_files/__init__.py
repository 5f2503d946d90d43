"""The import of many rows in the admin: choose a CSV file, look at its differences from the table, and confirm them."""

from __future__ import annotations
