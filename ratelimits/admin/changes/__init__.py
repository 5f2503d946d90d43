"""All changes of the configuration: who changed what, from what to what, when and why."""

from __future__ import annotations
