"""The changes of the configuration, each with its user, its time, its reason, and the values before and after."""

from __future__ import annotations
