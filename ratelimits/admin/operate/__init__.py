"""The pages on which staff block, allow or reset a key, or give it more permits. Each page asks for a reason."""

from __future__ import annotations
