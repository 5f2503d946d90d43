"""Decide on a Redis Cluster: find the node of each slot, and decide calls whose keys are on several nodes."""

from __future__ import annotations
