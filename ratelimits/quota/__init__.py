"""Answer requests: find the rules that apply, and let the engine decide. Without Redis, follow the failure policies."""

from __future__ import annotations
