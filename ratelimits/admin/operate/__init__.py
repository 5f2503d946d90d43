"""The pages on which staff block, allow, reset or grant more to a key. Each asks for a reason and a confirmation."""

from __future__ import annotations
