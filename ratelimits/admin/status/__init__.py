"""The status page: the state of the system now, and the requests of the last days."""

from __future__ import annotations
