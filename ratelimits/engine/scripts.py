"""The Lua scripts, each put together from the files in ratelimits/lua that it needs, and no others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_DIRECTORY = files("ratelimits") / "lua"
# smooth_warming_up.lua builds on smooth.lua; beyond that the order is free.
_ALGORITHMS = (
    "level",
    "window",
    "sliding_window",
    "sliding_log",
    "smooth",
    "smooth_warming_up",
    "concurrency",
)


@dataclass(frozen=True, slots=True)
class Script:
    """A script as the server knows it: its text, and the SHA-1 of it in hexadecimal."""

    text: bytes
    sha: bytes


@cache
def read(*names: str) -> Script:
    """The script made of these files of ratelimits/lua, in that order."""
    text = "\n".join((_DIRECTORY / f"{name}.lua").read_text() for name in names).encode()
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


@cache
def deciding(algorithms: frozenset[str]) -> Script:
    """The deciding script that knows the algorithms of these files."""
    needed = algorithms | ({"smooth"} if "smooth_warming_up" in algorithms else set())
    first, then = (("fast",), ("counted",)) if algorithms <= {"level", "window"} else ((), ())
    chosen = [f"algorithms/{name}" for name in _ALGORITHMS if name in needed]
    return read(*first, "run", "batch", "usage", *then, "prelude", *chosen, "decide")
