"""System checks: mistakes that can be seen before the first request."""

from __future__ import annotations
