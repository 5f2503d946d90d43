"""Measure how long the readers of outside texts need for hostile texts."""

from __future__ import annotations
