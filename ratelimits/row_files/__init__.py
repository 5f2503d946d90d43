"""Import and export of memberships, overrides and accounts as CSV files. An import is one edit."""

from __future__ import annotations
