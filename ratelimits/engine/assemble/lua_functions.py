"""Divide the functions of a Lua file into two groups: functions that most calls need, and functions needed rarely.

A script defines its functions again at each call, which takes about 60 ns for each function. So functions that are
needed rarely have the line "--@rarely" above them. In a script they are inside of one function, `rarely`, and the
script calls them as `rarely().name(…)`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

#: A function, with the comment above it. Its text ends with " end", or with a line "end" that is not indented.
_FUNCTION = re.compile(
    r"(?P<comment>(?:^--(?!@).*\n)*)(?P<rarely>^--@rarely\n)?"
    r"(?P<code>^local function (?P<name>\w+)\((?:.* end\n|.*\n(?s:.*?)^end\n))",
    re.MULTILINE,
)
_NAME_CHARACTERS = f"{string.ascii_letters}{string.digits}_"


class LuaFunction(NamedTuple):
    """A function of a Lua file. `text` is its whole text, with the comment above it."""

    name: str
    text: str


class Functions(NamedTuple):
    """The functions of a file.

    usual   the text of the file without the functions that are needed rarely
    named   the functions in `usual`
    rarely  the functions that are needed rarely
    """

    usual: str
    named: tuple[LuaFunction, ...]
    rarely: tuple[LuaFunction, ...]


def divided(text: str) -> Functions:
    """Return the functions of a Lua file."""
    named: list[LuaFunction] = []
    rarely: list[LuaFunction] = []
    for found in _FUNCTION.finditer(text):
        function = LuaFunction(found["name"], found["comment"] + found["code"])
        (rarely if found["rarely"] else named).append(function)
    usual = _FUNCTION.sub(lambda found: "" if found["rarely"] else found[0], text)
    return Functions(usual, tuple(named), tuple(rarely))


def rarely(functions: Sequence[LuaFunction]) -> Iterator[str]:
    """Yield the lines of the Lua function `rarely`, which contains these functions.

    These lines may contain directives of the template. The caller follows them.
    """
    yield "-- Returns the functions that are needed rarely. They are defined at the first call of this function."
    yield "function rarely()"
    for function in functions:
        yield from function.text.splitlines()
    yield "local functions = {"
    yield from (f"{one.name} = {one.name}," for one in functions)
    yield "}"
    yield "rarely = function() return functions end"
    yield "return functions"
    yield "end"


def without_unused(script: str, functions: Sequence[LuaFunction]) -> str:
    """Return a script without those of the given functions that the script never calls."""
    calls = Counter(_names_before_brackets(script))
    # Begin with the last function. If it is left out, perhaps an earlier function has no more callers.
    for name, text in reversed(functions):
        inside = _calls(text)
        # Compare the counts: are all calls of this function inside of the function itself?
        if calls[name] == inside[name] and text in script:
            # Remove the function, and its entry in the table that `rarely` returns.
            script = script.replace(text, "").replace(f"\n{name} = {name},\n", "\n")
            calls -= inside
    return script


@lru_cache(maxsize=256)
def _calls(text: str) -> Counter[str]:
    """Return how often a text calls each function. A definition, "function name(", counts as one call."""
    return Counter(_names_before_brackets(text))


def _names_before_brackets(text: str) -> Iterator[str]:
    """Yield each name directly before a "(". A regular expression would take eighty times as long."""
    for part in text.split("(")[:-1]:
        if name := part[len(part.rstrip(_NAME_CHARACTERS)) :]:
            yield name
