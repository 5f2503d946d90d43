"""Import of many rows in the admin: choose a CSV file, look at the differences to the table, and confirm them."""

from __future__ import annotations
