"""The recorder: it keeps the requests of some accounts and keys for some days, so that a rule can be tried on them."""

from __future__ import annotations
