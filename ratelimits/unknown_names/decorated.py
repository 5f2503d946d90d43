"""Remember what the decorator `limited` was given, also where no URL leads to the decorated function.

A project can decorate functions that views of other packages call, such as the method `serve` of a page of Wagtail. A
search of the URLconf does not find these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Given(NamedTuple):
    """The arguments of one use of the decorator. A cost in several meters is here the names of these meters."""

    scope: str
    cost: Any
    key: Any


#: Equal arguments are in it once. So it has as many entries as the code of the project has different arguments.
_given: dict[Given, None] = {}


def note(scope: object, cost: Any, key: Any) -> None:
    """Remember the arguments of the decorator. Leave out a scope that is translated."""
    if isinstance(scope, str):
        cost = tuple(cost) if isinstance(cost, Mapping) else cost
        _given[Given(scope, cost, tuple(key) if isinstance(key, list) else key)] = None


def all_given() -> tuple[Given, ...]:
    """Return the arguments of all uses of the decorator in the modules that this process has imported."""
    return tuple(_given)


def forget() -> None:
    """Forget all of them. Tests call this, because the functions of one test are not those of the next."""
    _given.clear()
