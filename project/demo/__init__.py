"""What `manage.py demo` is made of: processes, seed rows, traffic, and the comparison with the ledger."""

from __future__ import annotations
