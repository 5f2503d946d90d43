"""Read the Lua files of the algorithms: their functions, the names of their params, and the forms of their records.

The functions of each Lua file are divided into two groups: functions that most calls need, and functions needed rarely.
A script defines its functions again at each call, which takes about 60 ns for each function. So functions that are
needed rarely have the line "--@rarely" above them. In a script they are inside of one function, `rarely`, and the
script calls them as `rarely().name(…)`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from ratelimits.algorithms.base import Algorithm, Params
from ratelimits.engine.assemble import scripts

#: A function, with the comment above it. Its text ends with " end", or with a line "end" that is not indented.
_FUNCTION = re.compile(
    r"(?P<comment>(?:^--(?!@).*\n)*)(?P<rarely>^--@rarely\n)?"
    r"(?P<code>^local function (?P<name>\w+)\((?:.* end\n|.*\n(?s:.*?)^end\n))",
    re.MULTILINE,
)
_NAME_CHARACTERS = f"{string.ascii_letters}{string.digits}_"
#: A type in a struct format: an integer with its size in bytes, or a double (8 bytes).
_SIZES = re.compile(r"[iI](\d+)|d")
#: A function in the table of an algorithm: "function table.name(…)", its body, and "end". The body is a section.
#: The groups are the name of the table, the name of the function, and the body.
_SECTION = re.compile(r"^function (\w+)\.(\w+)\(.*?\)\n(.*?)^end\n", re.MULTILINE | re.DOTALL)
#: A directive "--@params <id of an algorithm, or *> <names of the params>".
_PARAMS = re.compile(r"^--@params (\S+) (.*)$", re.MULTILINE)
#: A directive "--@record <name> <type and name of each field> | <field>=<value> …". The part from "|" on is optional.
_RECORD = re.compile(r"^--@record (\w+) ([^|\n]*)(?:\| (.*))?$", re.MULTILINE)
#: Lines that are not copied into a script: the line that creates the table of the functions, and the directives
#: except "--@rarely".
_LEFT_OUT = re.compile(r"local \w+ = \{\}$|--@(?!rarely)")


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


@dataclass(frozen=True, slots=True)
class RecordForm:
    """A form of a record.

    format  the struct format of the payload. "c#" at its end stands for any number of bytes
    names   the fields in the payload, in order
    fixed   the fields that are not in the payload. In this form, such a field always has the value that is given here
    size    size of the payload in bytes, without the bytes of "c#"
    """

    format: str
    names: tuple[str, ...]
    fixed: dict[str, str]
    size: int

    @property
    def varies(self) -> bool:
        """Return whether payloads of this form have different sizes."""
        return self.format.endswith("c#")

    @property
    def conditions(self) -> list[str]:
        """Return the conditions under which a state can be written in this form."""
        # A field of four bytes holds only numbers below 2**32 (4294967296).
        small = [name for size, name in zip(_SIZES.findall(self.format), self.names, strict=False) if size == "4"]
        fixed = [f"l.{name} == {value}" for name, value in self.fixed.items()]
        return [*fixed, *(f"l.{name} < 4294967296" for name in small)]


@dataclass(frozen=True)
class AlgorithmFile:
    """The Lua file of an algorithm.

    functions the file's local functions, which its sections call
    shared    the fields of a limit that these functions use
    sections  the bodies of the functions that are inserted into the script
    params    the names of the params, by the id of the algorithm. "*" stands for all algorithms of the file
    forms     the forms of the record, by name
    """

    name: str
    functions: Functions
    shared: frozenset[str]
    sections: dict[str, str]
    params: dict[str, tuple[str, ...]]
    forms: dict[str, RecordForm]

    def params_of(self, algorithm: type[Algorithm]) -> tuple[str, ...]:
        """Return the names of all params of an algorithm. A param that the script does not need has the name "-"."""
        return self.params.get(algorithm.id) or self.params["*"]

    def form(self, name: str) -> RecordForm:
        """Return the form with this name.

        If the form ends with "c#", the name may end with a colon and a number of bytes. Then this number replaces "#".
        """
        name, _colon, size = name.partition(":")
        form = self.forms[name]
        if not size:
            return form
        return replace(form, format=form.format.replace("c#", f"c{size}"), size=form.size + int(size))

    def section(self, name: str) -> str:
        """Return the body of a function. Return "" if the file does not have this function.

        The name "release_or_refund" stands for `release`, or for `refund` if the file has no `release`.
        """
        if name == "release_or_refund":
            name = "release" if "release" in self.sections else "refund"
        return self.sections.get(name, "")


def _forms(text: str) -> dict[str, RecordForm]:
    forms = {}
    for name, fields, fixed in _RECORD.findall(text):
        words = fields.split()  # a type and a name by turns
        form = "".join(words[::2])
        size = sum(int(found[1] or 8) for found in _SIZES.finditer(form))  # a double ("d") has 8 bytes
        forms[name] = RecordForm(form, tuple(words[1::2]), dict(pair.split("=") for pair in fixed.split()), size)
    return forms


def _fields(names: tuple[str, ...]) -> str:
    return ", ".join(f"l.{name}" for name in names)


def _read_section(forms: dict[str, RecordForm]) -> str:
    """Return the section that reads a record: `size` bytes of `raw`, from the position `from`.

    The size tells the form of the record.
    """
    lines: list[str] = []
    for form in forms.values():
        rest = f"c' .. (size - {form.size})" if form.varies else "'"
        lines.append(f"{'elseif' if lines else 'if'} size {'>' if form.varies else '=='} {form.size} then")
        lines.append(f"  {_fields(form.names)} = read_struct('<{form.format.removesuffix('c#')}{rest}, raw, from)")
        if form.fixed:
            lines.append(f"  {_fields(tuple(form.fixed))} = {', '.join(form.fixed.values())}")
    return "\n".join([*lines, "end\n"])


def _pack_section(forms: dict[str, RecordForm]) -> str:
    """Return the section that makes the payload of a record, in the first form that can hold the state."""
    lines: list[str] = []
    for form in forms.values():
        names, rest = (form.names[:-1], f" .. l.{form.names[-1]}") if form.varies else (form.names, "")
        write = f"l.payload = write_struct('<{form.format.removesuffix('c#')}', {_fields(names)}){rest}"
        if form.conditions:
            lines += [f"{'elseif' if lines else 'if'} {' and '.join(form.conditions)} then", f"  {write}"]
        else:
            lines += ["else", f"  {write}", "end"] if lines else [write]
    return "\n".join([*lines, ""])


@cache
def algorithm_file(algorithm: type[Algorithm]) -> AlgorithmFile:
    """Return the Lua file of an algorithm, together with the files that it builds on."""
    endings = {**algorithm.storage.endings, **algorithm.storage.optional}
    text = "\n".join(scripts.text(f"algorithms/{name}", endings) for name in (*algorithm.builds_on, algorithm.script))
    forms = _forms(scripts.text(f"algorithms/{algorithm.script}"))
    sections = {name: body for _table, name, body in _SECTION.findall(text)}
    sections |= {"read": _read_section(forms), "pack": _pack_section(forms)}
    lines = [line for line in _SECTION.sub("", text).split("\n") if not _LEFT_OUT.match(line)]
    functions = divided(re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n")
    params = {name: tuple(words.split()) for name, words in _PARAMS.findall(text)}
    local_functions = "\n".join([functions.usual, *(function.text for function in functions.rarely)])
    shared = frozenset(re.findall(r"\bl\.(\w+)", local_functions))
    return AlgorithmFile(algorithm.script, functions, shared, sections, params, forms)


def params_of(algorithm: type[Algorithm], params: Params) -> Params:
    """Return those params of a limit that the script gets."""
    names = algorithm_file(algorithm).params_of(algorithm)
    return tuple(value for name, value in zip(names, params, strict=True) if name != "-")
