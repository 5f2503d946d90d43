"""The pages on which staff block, allow or reset a key, or give it more. Each page asks for a reason."""

from __future__ import annotations
