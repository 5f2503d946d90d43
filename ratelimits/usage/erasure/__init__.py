"""Erasing a customer: replace its names everywhere by pseudonyms, and keep every sum, chain, digest and signature."""

from __future__ import annotations

#: What higher floors erase of a customer: the dotted path of an `ErasedPart` of each. It is imported when a customer is
#: erased, not when Django starts.
PARTS: set[str] = set()
