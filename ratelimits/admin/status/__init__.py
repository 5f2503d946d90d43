"""The status page: how things are now, and what was admitted and refused lately."""

from __future__ import annotations
