"""Make the Lua scripts. A script contains only those files of ratelimits/lua that it needs.

The Lua files contain no parts of Redis keys. They contain placeholders such as "${open}" instead. This module replaces
the placeholders.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ratelimits.algorithms.base import Algorithm
from ratelimits.engine.keys import SHARD_KEYS

_DIRECTORY = files("ratelimits") / "lua"
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and its SHA-1 in hexadecimal. The server finds a loaded script by the SHA-1."""

    text: bytes
    sha: bytes


@cache
def read(*names: str) -> Script:
    """Return the script made of these files of ratelimits/lua, in this order."""
    return _script("\n".join(_source(name, SHARD_KEYS) for name in names))


def _source(name: str, key_parts: Mapping[str, str]) -> str:
    """Return the text of a file of ratelimits/lua, with each "${name}" replaced by `key_parts[name]`."""
    return _PLACEHOLDER.sub(lambda found: key_parts[found[1]], (_DIRECTORY / f"{name}.lua").read_text())


@cache
def _script(source: str) -> Script:
    text = source.encode()
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


@cache
def deciding(algorithms: frozenset[type[Algorithm]]) -> Script:
    """Return the deciding script with these algorithms."""
    has_fast_path = all(algorithm.has_fast_path for algorithm in algorithms)
    fast, counted = (("fast",), ("counted",)) if has_fast_path else ((), ())
    ordered = sorted(algorithms, key=lambda algorithm: algorithm.code)
    names = dict.fromkeys(name for algorithm in ordered for name in (*algorithm.builds_on, algorithm.script))
    endings: dict[str, str] = {}
    for algorithm in ordered:
        endings |= {**algorithm.storage.endings, **algorithm.storage.optional}
    algorithm_sources = [_source(f"algorithms/{name}", endings) for name in names]
    before = [_source(name, SHARD_KEYS) for name in (*fast, "run", "batch", "usage", *counted, "prelude")]
    return _script("\n".join([*before, *algorithm_sources, _source("decide", SHARD_KEYS)]))
