"""The Lua scripts. Each script is made of only those files in ratelimits/lua that it needs.

The Lua files contain no parts of Redis keys. They contain placeholders such as "${open}", which this module replaces.
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
    """A script's text, and the SHA-1 of the text in hexadecimal. The server finds a loaded script by this SHA-1."""

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
    fast, counted = (("fast",), ("counted",)) if all(one.has_fast_path for one in algorithms) else ((), ())
    ordered = sorted(algorithms, key=lambda one: one.code)
    needed = dict.fromkeys(name for one in ordered for name in (*one.builds_on, one.script))
    endings = {name: ending for one in ordered for name, ending in one.storage.endings.items()}
    chosen = [_source(f"algorithms/{name}", endings) for name in needed]
    before = [_source(name, SHARD_KEYS) for name in (*fast, "run", "batch", "usage", *counted, "prelude")]
    return _script("\n".join([*before, *chosen, _source("decide", SHARD_KEYS)]))
