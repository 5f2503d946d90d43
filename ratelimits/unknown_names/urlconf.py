"""Find the scopes, meters and keys in the views of the project's URLconf, and in functions with the decorator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.urls import URLPattern, URLResolver, get_resolver

from ratelimits.conf import conf
from ratelimits.unknown_names import decorated
from ratelimits.view_keys import sources_of

#: If a view names no cost, `QuotaThrottle` and `limited` count in this meter.
_DEFAULT_METER = "requests"
_ATTRIBUTES = "throttle_scope", "throttle_cost", "throttle_key"


@dataclass(frozen=True, slots=True)
class ViewNames:
    """The scopes and meters of all views, and the keys that they give, such as "header:X-Tenant".

    A field is None if a view computes its scope, its cost or its key for each request: then other names are possible
    too.
    """

    scopes: frozenset[str] | None
    meters: frozenset[str] | None
    keys: frozenset[str] | None


@dataclass(slots=True)
class _NamesInCode:
    """The scopes, meters and keys that are written in the code of views.

    every_scope  whether the scopes of all views are written in the code
    every_meter  whether the meters of all views are written in the code
    every_key    whether the keys of all views are written in the code
    """

    scopes: set[str]
    meters: set[str]
    keys: set[str]
    every_scope: bool = True
    every_meter: bool = True
    every_key: bool = True


def named_by_views() -> ViewNames:
    """Return the scopes, meters and keys of all views of ROOT_URLCONF and of all functions with the decorator."""
    names = _names_in_code()
    return ViewNames(
        frozenset(names.scopes) if names.every_scope else None,
        frozenset(names.meters) if names.every_meter else None,
        frozenset(names.keys) if names.every_key else None,
    )


def written_in_views() -> tuple[frozenset[str], frozenset[str]]:
    """Return the scopes and the meters that are written in the code of views and of functions with the decorator.

    Views can compute other scopes and meters for each request.
    """
    names = _names_in_code()
    return frozenset(names.scopes), frozenset(names.meters)


def keys_of_views() -> frozenset[str]:
    """Return the keys that are written in the code of views of ROOT_URLCONF, such as "header:X-Tenant"."""
    return frozenset(_names_in_code().keys)


def _names_in_code() -> _NamesInCode:
    names = _NamesInCode(set(), {_DEFAULT_METER}, set())
    # The middleware limits the paths in PATHS. If PATHS is a list, it names no scopes and no costs.
    all_options = conf.PATHS.values() if isinstance(conf.PATHS, dict) else ()
    of_paths = ((options.get("scope"), options.get("cost"), options.get("key")) for options in all_options)
    for scope, cost, key in (*_options_of_views(all_patterns()), *of_paths, *decorated.all_given()):
        if scope is None or isinstance(scope, str):
            names.scopes.add(scope or "*")
        else:
            names.every_scope = False
        if isinstance(cost, Mapping | tuple):
            names.meters |= {meter for meter in cost if isinstance(meter, str)}
        elif cost is not None and not isinstance(cost, int):
            names.every_meter = False
        if isinstance(key, property):
            names.every_key = False
        elif key is not None:
            with suppress(ImproperlyConfigured):  # the first request to the view raises this error
                names.keys |= {source.text for source in sources_of(key)}
    return names


def all_patterns() -> list[URLPattern | URLResolver]:
    """Return the patterns of ROOT_URLCONF, and of the URLconfs that django-tenants uses for some tenants."""
    of_types = [options.get("URLCONF") for options in (getattr(settings, "TENANT_TYPES", None) or {}).values()]
    further = {getattr(settings, "PUBLIC_SCHEMA_URLCONF", None), *of_types} - {None, "", settings.ROOT_URLCONF}
    return [entry for urlconf in (None, *sorted(further)) for entry in get_resolver(urlconf).url_patterns]


def _options_of_views(patterns: Iterable[URLPattern | URLResolver]) -> Iterator[tuple[Any, ...]]:
    """Yield the scope, the cost and the key of each view. They are None for a view that does not name them.

    They are attributes of a view of Django REST framework or of its throttles, or arguments of the decorator.
    """
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _options_of_views(pattern.url_patterns)
            continue
        view: Any = pattern.callback
        view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
        if view_class is not None:
            # Django REST framework has another name for the values given to `as_view`.
            options = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", {})
            yield tuple(options.get(name, getattr(view_class, name, None)) for name in _ATTRIBUTES)
            throttles = options.get("throttle_classes", getattr(view_class, "throttle_classes", None)) or ()
            yield from ((None, None, getattr(one, "throttle_key", None)) for one in throttles)
        else:
            yield tuple(getattr(view, name, None) for name in _ATTRIBUTES)
        yield from (function.ratelimits for function in decorated_functions(view))


def decorated_functions(view: Any) -> Iterator[Any]:
    """Yield the functions of a view to which the project has applied the decorator `limited`.

    The decorator stores the scope, the cost and the key in the attribute `ratelimits`. A function can be yielded twice.
    """
    functions = [view]
    view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
    if view_class is not None:
        methods = ("dispatch", *view_class.http_method_names, *(getattr(view, "actions", None) or {}).values())
        functions += [getattr(view_class, method, None) for method in methods]
        # `api_view` makes a class. The closure of its methods has the decorated function.
        functions += [content for function in functions for content in _closure(function) if isfunction(content)]
    else:
        # django-ninja makes a function for each path. Its closure has an object with the operations of the path.
        for content in _closure(view):
            functions += [getattr(operation, "view_func", None) for operation in getattr(content, "operations", ())]
    yield from (function for function in functions if isinstance(getattr(function, "ratelimits", None), tuple))


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
