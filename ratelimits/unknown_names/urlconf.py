"""Find the scopes and meters in the views of the project's URLconf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

from ratelimits.conf import conf

#: If a view names no cost, `QuotaThrottle` and `limited` count in this meter.
_DEFAULT_METER = "requests"
_ATTRIBUTES = "throttle_scope", "throttle_cost"


@dataclass(frozen=True, slots=True)
class ViewNames:
    """The scopes and meters of all views.

    A field is None if a view computes its scope or cost for each request: then other names are possible too.
    """

    scopes: frozenset[str] | None
    meters: frozenset[str] | None


@dataclass(slots=True)
class _NamesInCode:
    """The scopes and meters that are written in the code of views.

    every_scope  whether the scopes of all views are written in the code
    every_meter  whether the meters of all views are written in the code
    """

    scopes: set[str]
    meters: set[str]
    every_scope: bool
    every_meter: bool


def named_by_views() -> ViewNames:
    """Return the scopes and meters of all views of ROOT_URLCONF."""
    names = _names_in_code()
    return ViewNames(
        frozenset(names.scopes) if names.every_scope else None, frozenset(names.meters) if names.every_meter else None
    )


def written_in_views() -> tuple[frozenset[str], frozenset[str]]:
    """Return the scopes and the meters that are written in the code of views of ROOT_URLCONF.

    Views can compute other scopes and meters for each request.
    """
    names = _names_in_code()
    return frozenset(names.scopes), frozenset(names.meters)


def _names_in_code() -> _NamesInCode:
    names = _NamesInCode(set(), {_DEFAULT_METER}, every_scope=True, every_meter=True)
    # The middleware limits the paths in PATHS. If PATHS is a list, it names no scopes and no costs.
    all_options = conf.PATHS.values() if isinstance(conf.PATHS, dict) else ()
    of_paths = ((options.get("scope"), options.get("cost")) for options in all_options)
    for scope, cost in (*_scopes_and_costs(get_resolver().url_patterns), *of_paths):
        if scope is None or isinstance(scope, str):
            names.scopes.add(scope or "*")
        else:
            names.every_scope = False
        if isinstance(cost, Mapping):
            names.meters |= {meter for meter in cost if isinstance(meter, str)}
        elif cost is not None and not isinstance(cost, int):
            names.every_meter = False
    return names


def _scopes_and_costs(patterns: list[URLPattern | URLResolver]) -> Iterator[tuple[Any, ...]]:
    """Yield the scope and the cost of each view. They are None for a view that does not name them.

    The scope and the cost are attributes of a view of Django REST framework, or arguments of the decorator.
    """
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _scopes_and_costs(pattern.url_patterns)
            continue
        view: Any = pattern.callback
        # Functions to which the project can have applied the decorator. The decorator stores the scope and the cost in
        # the attribute `ratelimits`.
        decorated = [view]
        view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
        if view_class is not None:
            options = getattr(view, "initkwargs", {})
            yield tuple(options.get(name, getattr(view_class, name, None)) for name in _ATTRIBUTES)
            decorated += [getattr(view_class, method, None) for method in ("dispatch", *view_class.http_method_names)]
        else:
            yield tuple(getattr(view, name, None) for name in _ATTRIBUTES)
        # django-ninja makes a function for each path. Its closure has an object with the operations of the path.
        for cell in getattr(view, "__closure__", None) or ():
            operations = getattr(cell.cell_contents, "operations", ())
            decorated += [getattr(operation, "view_func", None) for operation in operations]
        yield from (func.ratelimits for func in decorated if isinstance(getattr(func, "ratelimits", None), tuple))
