"""Find the scopes and meters in the views of the project's URLconf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

#: The meter that QuotaThrottle and `limited` count if a view names no cost.
_DEFAULT_METER = "requests"


@dataclass(frozen=True, slots=True)
class ViewNames:
    """The names in all views. A field is None if some view computes its scope or cost for each request."""

    scopes: frozenset[str] | None
    meters: frozenset[str] | None


@dataclass(slots=True)
class _Found:
    """The names in the code of views, and whether all views have their names in the code."""

    scopes: set[str]
    meters: set[str]
    every_scope: bool
    every_meter: bool


def named_by_views() -> ViewNames:
    """Return the scopes and meters of all views of ROOT_URLCONF."""
    found = _found()
    return ViewNames(
        frozenset(found.scopes) if found.every_scope else None, frozenset(found.meters) if found.every_meter else None
    )


def written_in_views() -> tuple[frozenset[str], frozenset[str]]:
    """Return the scopes and meters in the code of views of ROOT_URLCONF. Others may be computed for each request."""
    found = _found()
    return frozenset(found.scopes), frozenset(found.meters)


def _found() -> _Found:
    found = _Found(set(), {_DEFAULT_METER}, every_scope=True, every_meter=True)
    for scope, cost in _governed(get_resolver().url_patterns):
        if scope is None or isinstance(scope, str):
            found.scopes.add(scope or "*")
        else:
            found.every_scope = False
        if isinstance(cost, Mapping):
            found.meters |= {meter for meter in cost if isinstance(meter, str)}
        elif cost is not None and not isinstance(cost, int):
            found.every_meter = False
    return found


def _governed(patterns: list[URLPattern | URLResolver]) -> Iterator[tuple[Any, ...]]:
    """Yield the scope and cost of each limited view: from attributes of DRF's views, and from the decorator."""
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _governed(pattern.url_patterns)
            continue
        view: Any = pattern.callback
        decorated = [view]
        view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
        if view_class is not None:
            options = getattr(view, "initkwargs", {})
            names = ("throttle_scope", "throttle_cost")
            yield tuple(options.get(name, getattr(view_class, name, None)) for name in names)
            decorated += [getattr(view_class, method, None) for method in ("dispatch", *view_class.http_method_names)]
        yield from (func.ratelimits for func in decorated if isinstance(getattr(func, "ratelimits", None), tuple))
