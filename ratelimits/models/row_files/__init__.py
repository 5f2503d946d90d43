"""What the import of files needs to keep."""

from __future__ import annotations
