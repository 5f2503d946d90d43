"""How long pages of the admin take over a big ledger, and how many queries they make."""

from __future__ import annotations
