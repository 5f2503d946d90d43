"""Make the Lua scripts, and the commands in RESP, the protocol of Redis, that send and call them.

A script contains only those files of ratelimits/lua that it needs. Where a Lua file needs a part of a Redis key, it has
a placeholder such as "${open}" instead. This module replaces the placeholders.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Protocol

from ratelimits.engine.keys import SHARD_KEYS

_DIRECTORY = files("ratelimits") / "lua"
#: A placeholder, such as `${meta}`.
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
#: What is before the SHA-1 of the script in a command that calls it.
_CALLED = b"$7\r\nEVALSHA\r\n$40\r\n"


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


def bulks(*parts: bytes) -> bytes:
    """Return all parts as bulk strings of RESP, one after another."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def resp(*parts: bytes) -> bytes:
    """Return a command in RESP."""
    return b"*%d\r\n" % len(parts) + bulks(*parts)


def loading(script: Script) -> bytes:
    """Return the command that loads a script into the server."""
    return resp(b"SCRIPT", b"LOAD", script.text)


def evaluating(packed: bytes, script: Script) -> bytes:
    """Return a command that calls a loaded script (EVALSHA) as one that sends the script's text with it (EVAL)."""
    start, rest = packed.split(_CALLED + script.sha + b"\r\n", 1)
    return start + bulks(b"EVAL", script.text) + rest


def loading_first(commands: Sequence[bytes], scripts: Iterable[Script]) -> list[bytes]:
    """Return the commands, of which the first that calls each of these scripts sends the text of the script."""
    given, missing = list(commands), {script.sha: script for script in scripts}
    for place, packed in enumerate(given):
        if not missing:
            break
        _start, called, rest = packed.partition(_CALLED)
        if called and (script := missing.pop(rest[:40], None)) is not None:
            given[place] = evaluating(packed, script)
    return given


class Sendable(Protocol):
    """A command that can be sent. If it calls a Lua script, `script` is this script: the server may need to load it."""

    @property
    def script(self) -> Script: ...

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP. `run` is the run of the server, `nonce` the unique name of this call."""


class HasKey(Protocol):
    """A command whose Redis keys are all in one slot of a cluster. `key` is one of them."""

    @property
    def key(self) -> bytes: ...


#: Strings and comments. Words in them do not open or close a block.
_IGNORED = re.compile(r"'[^'\n]*'|--.*")
#: Words and brackets that open a block, and those that close one. "else" closes one block and opens the next; after
#: "elseif", the word "then" opens the next block.
_OPENS = re.compile(r"\b(?:function|do|then|else|repeat)\b|[({]")
_CLOSES = re.compile(r"\b(?:end|until|elseif|else)\b|[)}]")
#: The closing words and brackets with which a line begins. They close their blocks before the line is indented.
_LEADING_CLOSES = re.compile(r"(?:(?:end|until|elseif|else)\b|[)}\s])*")
#: The start of a line that continues the line before. Such a line is indented by one more step.
_CONTINUES = re.compile(r"(?:and|or) |\.\. ")


def indented(source: str) -> str:
    """Return the text of a script, indented by two spaces for each open block. Keep one of several empty lines."""
    out: list[str] = []
    depth = 0
    for line in source.strip("\n").split("\n"):
        text = line.strip()
        code = _IGNORED.sub("", text).strip()
        leading = _LEADING_CLOSES.match(code)
        indent = depth - len(_CLOSES.findall(leading[0] if leading else "")) + bool(_CONTINUES.match(code))
        out.append("  " * indent + text)
        depth += len(_OPENS.findall(code)) - len(_CLOSES.findall(code))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)) + "\n"
