"""Import of many memberships, overrides or accounts from a CSV file, as one edit; and their export."""

from __future__ import annotations
