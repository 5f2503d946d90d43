"""Test that no regular expression of the app needs long for a hostile text: `re` stops all threads while it matches."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.validators import RegexValidator
from django.urls import URLResolver, get_resolver

import ratelimits
from tests.support.own_apps import own_models

codes: Any = importlib.import_module("re._constants")
parser: Any = importlib.import_module("re._parser")
APP = Path(ratelimits.__file__).parent
#: These modules read only the Lua files of the app, or the settings and the URLconf of the project.
OWN_FILES = ("ratelimits.engine.assemble.", "ratelimits.checks.paths")
#: Functions of `re` whose first argument is a pattern.
FUNCTIONS = {"compile", "match", "fullmatch", "search", "split", "sub", "subn", "findall", "finditer"}
#: A repetition with this maximum is as bad as one without an end.
MANY = 100
REPEATS = {codes.MAX_REPEAT, codes.MIN_REPEAT}
#: All characters that the patterns of the app tell apart, and some of each kind that they do not.
CHARACTERS = frozenset([*map(chr, range(256)), "ſ", "٣", "字", " ", "\ud800", "😀"])


def problems(pattern: str | bytes, flags: int = 0) -> list[str]:
    """Return what makes this pattern slow on some text: nested or overlapping repetitions."""
    parsed = parser.parse(pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern, flags)
    return list(_problems(list(parsed), parsed.state.flags))


def _problems(items: list[Any], flags: int, repeated: bool = False) -> Iterator[str]:
    """Yield the problems of a sequence. `repeated` is true inside a repetition that can be matched in several ways."""
    running: frozenset[str] = frozenset()  # what the repetitions just before this item can also match
    for code, value in items:
        first = _first((code, value), flags)
        unbounded = code in REPEATS and value[1] >= MANY
        if unbounded and repeated:
            yield "a repetition in a repetition"
        if unbounded and running & first:
            yield f"two repetitions after each other match {min(running & first)!r}"
        if code is codes.BRANCH and repeated:
            yield from _overlaps(value[1], flags)
        for inner in _inner(code, value):
            yield from _problems(inner, flags, repeated or unbounded)
        if unbounded:
            running |= first
        elif not _nullable(code, value):
            running = _tail(code, value, flags)


def _tail(code: Any, value: Any, flags: int) -> frozenset[str]:
    """Return what a repetition at the end of this item can match."""
    if code is codes.SUBPATTERN:
        items = list(value[3])
        if items and items[-1][0] in REPEATS and items[-1][1][1] >= MANY:
            return _first(items[-1], flags)
    return frozenset()


def _overlaps(branches: list[Any], flags: int) -> Iterator[str]:
    seen: frozenset[str] = frozenset()
    for branch in branches:
        first = _first_of(list(branch), flags)
        if seen & first or all(_nullable(*item) for item in branch):
            yield "two branches of a repetition begin alike"
        seen |= first


def _inner(code: Any, value: Any) -> list[list[Any]]:
    """Return the sequences in an item. Of possessive repetitions and atomic groups: those that are matched once."""
    if code in REPEATS or code is codes.POSSESSIVE_REPEAT:
        return [list(value[2])]
    if code is codes.SUBPATTERN:
        return [list(value[3])]
    if code is codes.ATOMIC_GROUP:
        return [list(value)]
    if code is codes.BRANCH:
        return [list(branch) for branch in value[1]]
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [list(value[1])]
    if code is codes.GROUPREF_EXISTS:
        return [list(branch) for branch in value[1:] if branch is not None]
    return []


def _nullable(code: Any, value: Any) -> bool:
    """Return whether the item matches the empty text."""
    if code in REPEATS or code is codes.POSSESSIVE_REPEAT:
        return value[0] == 0 or all(_nullable(*item) for item in value[2])
    if code is codes.BRANCH:
        return any(all(_nullable(*item) for item in branch) for branch in value[1])
    if code in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
        return True
    inner = _inner(code, value)
    return bool(inner) and all(_nullable(*item) for item in inner[0])


def _first_of(items: list[Any], flags: int) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for item in items:
        found |= _first(item, flags)
        if not _nullable(*item):
            break
    return found


def _first(item: tuple[Any, Any], flags: int) -> frozenset[str]:
    """Return the characters with which a match of this item can begin."""
    code, value = item
    if code is codes.GROUPREF:
        return CHARACTERS
    if code not in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY):
        if code in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
            return frozenset()
        return frozenset().union(*(_first_of(inner, flags) for inner in _inner(code, value)))
    members = value if code is codes.IN else [(code, value)]
    found = frozenset().union(*(_members(member, flags) for member in members if member[0] is not codes.NEGATE))
    if flags & re.IGNORECASE:
        found = frozenset(char for char in CHARACTERS if {char.lower(), char.upper(), char} & found)
    return CHARACTERS - found if members[0][0] is codes.NEGATE else found


def _members(item: tuple[Any, Any], flags: int) -> frozenset[str]:
    code, value = item
    if code is codes.ANY:
        return CHARACTERS if flags & re.DOTALL else CHARACTERS - {"\n"}
    if code is codes.NOT_LITERAL:
        return CHARACTERS - {chr(value)}
    if code is codes.RANGE:
        return frozenset(char for char in CHARACTERS if value[0] <= ord(char) <= value[1])
    if code is codes.CATEGORY:
        letter = str(value).rpartition("_")[2][0].lower()
        letter = letter.upper() if "_NOT_" in str(value) else letter
        return frozenset(char for char in CHARACTERS if re.match(f"\\{letter}", char, flags & re.ASCII))
    assert code is codes.LITERAL
    return frozenset({chr(value)}) & CHARACTERS


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(ratelimits.__path__, "ratelimits."):
        if not found.name.startswith(OWN_FILES):
            yield found.name


def patterns() -> Iterator[tuple[str, str | bytes, int]]:
    """Yield each pattern of the app: where it is, its text, and its flags."""
    for name in modules():
        module = importlib.import_module(name)
        compiled = {key: value for key, value in vars(module).items() if isinstance(value, re.Pattern)}
        for collection in [value for value in vars(module).values() if isinstance(value, dict)]:
            compiled |= {str(key): value for key, value in collection.items() if isinstance(value, re.Pattern)}
        for key, pattern in compiled.items():
            yield f"{name}.{key}", pattern.pattern, pattern.flags
        assert module.__file__ is not None
        text = Path(module.__file__).read_text()
        if "re." not in text:
            continue  # `_calls_re` sees no other call
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _calls_re(node.func) and not _is_global(node, tree):
                yield f"{name}:{node.lineno}", *_literal(node, name)
    for model in own_models():
        for field in model._meta.fields:
            for validator in field.validators:
                if isinstance(validator, RegexValidator):
                    regex: Any = validator.regex
                    yield str(field), regex.pattern, regex.flags
    yield from _routes(get_resolver())


def _calls_re(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
        and function.attr in FUNCTIONS
    )


def _is_global(node: ast.Call, tree: ast.Module) -> bool:
    """Return whether the call compiles a pattern outside of functions, so that it is an attribute of the module."""
    return (
        any(
            isinstance(statement, (ast.Assign, ast.AnnAssign))
            and statement.lineno <= node.lineno <= statement.end_lineno
            for statement in tree.body
            if statement.end_lineno is not None
        )
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "compile"
    )


def _literal(node: ast.Call, name: str) -> tuple[str | bytes, int]:
    """Return the pattern and the flags of a call. They must be literals, or a pattern of the same module."""
    argument = node.args[0]
    assert isinstance(argument, ast.Constant), f"{name}:{node.lineno}: compile this pattern once, in the module"
    flags = [
        flag.attr
        for part in [*node.args[1:], *(keyword.value for keyword in node.keywords)]
        for flag in ast.walk(part)
        if isinstance(flag, ast.Attribute) and isinstance(flag.value, ast.Name) and flag.value.id == "re"
    ]
    assert isinstance(argument.value, (str, bytes))
    return argument.value, sum(int(getattr(re, flag)) for flag in flags)


def _routes(resolver: URLResolver) -> Iterator[tuple[str, str, int]]:
    for found in resolver.url_patterns:
        regex = found.pattern.regex
        yield f"the route {found.pattern}", regex.pattern, regex.flags
        if isinstance(found, URLResolver):
            yield from _routes(found)


def test_no_pattern_repeats_what_it_repeats() -> None:
    found = list(patterns())
    assert len(found) > 60
    slow = {f"{place}: {text!r}": said for place, text, flags in found if (said := problems(text, flags))}
    assert slow == {}


@pytest.mark.parametrize(
    ("pattern", "is_slow"),
    [
        (r"(a+)+b", True),
        (r"(?:\s*[0-9]+\s*[a-z]+\s*)+", True),
        (r"(?:,[A-Z]+)*", True),
        (r"(?:,[A-Z]++)*+", False),
        (r"(?:ab?|[a-c]x)*", True),
        (r"(?:a|b)*", False),
        (r"(?:a*|b)*", True),
        (r"\s*(.*?)\s*:", True),
        (r"\s*[a-z]*:", False),
        (r"[0-9]+\.?[0-9]*", True),
        (r"[0-9]*\.[0-9]*", False),
        (r"(?:x[0-9]*)[0-9]+", True),
        (r"\s*+[0-9]++\s*+", False),
        (r"(?i)A*[a]*", True),
    ],
)
def test_what_the_test_of_all_patterns_sees(pattern: str, is_slow: bool) -> None:
    assert bool(problems(pattern)) == is_slow
