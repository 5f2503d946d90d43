"""Read addresses, and find the address of a request behind the proxies of the project."""

from __future__ import annotations
