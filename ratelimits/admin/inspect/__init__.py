"""The inspector: what limits a key, why, what is left, and what was refused lately."""

from __future__ import annotations
