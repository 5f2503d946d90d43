"""What the commands need: servers, clocks, settings, and what they print."""

from __future__ import annotations
