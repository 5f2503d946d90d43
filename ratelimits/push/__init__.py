"""Pushing: the lines of finalised reports to billing systems, each once, with a ledger of what was delivered."""

from __future__ import annotations
