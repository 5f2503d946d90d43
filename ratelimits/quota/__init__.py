"""Answer requests: find the rules that apply, let the engine decide, and answer without it if Redis cannot be asked."""

from __future__ import annotations
