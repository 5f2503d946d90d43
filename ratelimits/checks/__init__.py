"""System checks, which report mistakes before the first request."""

from __future__ import annotations
