"""The scope of a rule: the requests that it covers, by the scope of their view and by their method."""

from __future__ import annotations

import re

SCOPE = re.compile(r"(?P<scope>\*|[^\s:,*]+)(:(?P<methods>[A-Z]+(,[A-Z]+)*))?")


def split_scope(text: str) -> tuple[str, frozenset[str]]:
    """Return a rule's scope and its methods, an empty set for all: "search:POST" is ("search", {"POST"}).

    For an invalid text, return the widest meaning that it may have: all methods, and all scopes if the scope is
    invalid.
    """
    scope, _colon, methods = text.partition(":")
    if SCOPE.fullmatch(text):
        return scope, frozenset(methods.split(",")) if methods else frozenset()
    return scope if SCOPE.fullmatch(scope) else "*", frozenset()
