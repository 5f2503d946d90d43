"""Measure how long pages of the admin take with a large database, and how many queries they make."""

from __future__ import annotations
