"""Pushing: send the lines of finalised reports to billing systems, each once, and record every delivery in a ledger."""

from __future__ import annotations
