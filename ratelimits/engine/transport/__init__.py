"""Bytes to a server and back: connections, pools and loops, and the breaker that spares a server."""

from __future__ import annotations
