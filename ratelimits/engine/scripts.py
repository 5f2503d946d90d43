"""The Lua scripts, each put together from the files in ratelimits/lua that it needs, and no others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ratelimits.algorithms.base import Algorithm

_DIRECTORY = files("ratelimits") / "lua"


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
def deciding(algorithms: frozenset[type[Algorithm]]) -> Script:
    """The deciding script that knows these algorithms."""
    first, then = (("fast",), ("counted",)) if all(one.has_fast_path for one in algorithms) else ((), ())
    ordered = sorted(algorithms, key=lambda one: one.code)
    needed = dict.fromkeys(name for one in ordered for name in (*one.builds_on, one.script))
    chosen = [f"algorithms/{name}" for name in needed]
    return read(*first, "run", "batch", "usage", *then, "prelude", *chosen, "decide")
