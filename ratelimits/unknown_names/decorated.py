"""Remember what the decorator `limited` was given, also where no URL leads to the decorated function.

A project can decorate functions that views of other packages call, such as the method `serve` of a page of Wagtail. A
search of the URLconf does not find these functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple


class Given(NamedTuple):
    """The arguments of one use of the decorator, as far as they can name a scope, a meter or a key.

    cost  None or the names of the meters; `callable` if the cost is computed for each request
    key   None or the keys
    """

    scope: str
    cost: Any
    key: tuple[Any, ...] | None


#: Equal arguments are in it once. So it has as many entries as the code of the project has different arguments.
_given: dict[Given, None] = {}


def note(scope: object, cost: Any, key: Any) -> None:
    """Remember the arguments of the decorator. Leave out a scope that is translated, and whatever is not valid."""
    if not isinstance(scope, str):
        return
    if isinstance(cost, Mapping):
        meters: Any = tuple(name for name in cost if isinstance(name, str))
    else:
        meters = callable if callable(cost) or isinstance(cost, str) else None
    each: Iterable[Any] = key if isinstance(key, (list, tuple)) else (key,)
    valid = (one for one in each if isinstance(one, Hashable) and (isinstance(one, str) or callable(one)))
    keys: tuple[Any, ...] = tuple(valid)
    _given[Given(scope, meters, keys or None)] = None


def all_given() -> tuple[Given, ...]:
    """Return the arguments of all uses of the decorator in the modules that this process has imported."""
    return tuple(_given)


def forget() -> None:
    """Forget all of them. Tests call this, because the functions of one test are not those of the next."""
    _given.clear()
