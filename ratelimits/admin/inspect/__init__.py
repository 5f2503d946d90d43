"""The inspector: a page that shows which rules limit a key and why, what is left, and the last refusals."""

from __future__ import annotations
