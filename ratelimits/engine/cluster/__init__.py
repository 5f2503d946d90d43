"""Decisions on a Redis Cluster: which node has which slots, and calls that lie on several nodes."""

from __future__ import annotations
