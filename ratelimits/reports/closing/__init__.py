"""Closing: billing periods with complete usage get reports, and later changes get new versions of them."""

from __future__ import annotations
