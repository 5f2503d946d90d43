"""Reports in the admin, with their lines."""

from __future__ import annotations
