"""The text in the field `scope` of a rule: a scope, or "*" for all scopes. HTTP methods can follow: "search:POST"."""

from __future__ import annotations

import re

#: A text of this field, such as "*", "search" or "search:POST,PUT".
SCOPE = re.compile(r"(?P<scope>\*|[^\s:,*]+)(:(?P<methods>[A-Z]++(,[A-Z]++)*+))?")


def split_scope(text: str) -> tuple[str, frozenset[str]]:
    """Return the scope and the methods in a text: ("search", {"POST"}) for "search:POST".

    An empty set means all methods. If the text is invalid, return its scope with all methods. If the scope is invalid
    too, return the scope "*", which means all scopes.
    """
    scope, _colon, methods = text.partition(":")
    if SCOPE.fullmatch(text):
        return scope, frozenset(methods.split(",")) if methods else frozenset()
    return scope if SCOPE.fullmatch(scope) else "*", frozenset()


def names_in(text: str) -> tuple[str, ...]:
    """Return the scopes in a text such as "health, webhooks", each once. Commas or spaces separate the scopes."""
    return tuple(dict.fromkeys(name for name in re.split(r"[\s,]+", text) if name))
