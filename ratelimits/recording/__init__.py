"""The recorder keeps the requests of some accounts and keys for some days. Staff can try rules on these requests."""

from __future__ import annotations
