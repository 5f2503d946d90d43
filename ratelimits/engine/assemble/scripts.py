"""Make the Lua scripts. A script contains only those files of ratelimits/lua that it needs.

Where a Lua file needs a part of a Redis key, it has a placeholder such as "${open}" instead. This module replaces the
placeholders.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ratelimits.engine.keys import SHARD_KEYS

_DIRECTORY = files("ratelimits") / "lua"
#: A placeholder, such as `${meta}`.
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a script, and its SHA-1 in hexadecimal. The server finds a loaded script by the SHA-1."""

    text: bytes
    sha: bytes


@cache
def read(*names: str) -> Script:
    """Return the script made of these files of ratelimits/lua, in this order."""
    return script("\n".join(text(name) for name in names))


def text(name: str, key_parts: Mapping[str, str] = SHARD_KEYS) -> str:
    """Return the text of a file of ratelimits/lua, with its placeholders replaced by `key_parts` (see `filled`)."""
    return filled(_file(name), key_parts)


@cache
def _file(name: str) -> str:
    return (_DIRECTORY / f"{name}.lua").read_text()


def filled(source: str, parts: Mapping[str, str]) -> str:
    """Replace each "${name}" in a text by `parts[name]`. Leave placeholders whose names are not in `parts`."""
    if "${" not in source:
        return source
    return _PLACEHOLDER.sub(lambda found: parts.get(found[1], found[0]), source)


@cache
def script(source: str) -> Script:
    """Return the script with this text."""
    encoded = source.encode()
    return Script(encoded, hashlib.sha1(encoded, usedforsecurity=False).hexdigest().encode())
