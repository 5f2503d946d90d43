"""Many memberships, overrides or accounts as one CSV file: what it would change, and all of it as one edit."""

from __future__ import annotations
