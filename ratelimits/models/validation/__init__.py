"""What makes no sense in a row, said at the field that is wrong."""

from __future__ import annotations
