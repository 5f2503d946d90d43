"""Which scopes and meters the views of the project's URLconf name, as far as that can be known without a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

#: What QuotaThrottle and `limited` count if a view names no cost.
_DEFAULT_METER = "requests"


@dataclass(frozen=True, slots=True)
class Named:
    """What the views name; None where some view works it out for each request."""

    scopes: frozenset[str] | None
    meters: frozenset[str] | None


def named_by_views() -> Named:
    """Return the scopes and meters of all views of ROOT_URLCONF."""
    scopes: set[str] = set()
    meters = {_DEFAULT_METER}
    every_scope = every_meter = True
    for scope, cost in _governed(get_resolver().url_patterns):
        if scope is None or isinstance(scope, str):
            scopes.add(scope or "*")
        else:
            every_scope = False
        if isinstance(cost, Mapping):
            meters |= {meter for meter in cost if isinstance(meter, str)}
        elif cost is not None and not isinstance(cost, int):
            every_meter = False
    return Named(frozenset(scopes) if every_scope else None, frozenset(meters) if every_meter else None)


def _governed(patterns: list[URLPattern | URLResolver]) -> Iterator[tuple[Any, ...]]:
    """Yield the scope and cost of each view: of DRF's by its attributes, of others by the decorator."""
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _governed(pattern.url_patterns)
            continue
        view: Any = pattern.callback
        decorated = [view]
        kind = getattr(view, "cls", None) or getattr(view, "view_class", None)
        if kind is not None:
            given = getattr(view, "initkwargs", {})
            yield tuple(given.get(name, getattr(kind, name, None)) for name in ("throttle_scope", "throttle_cost"))
            decorated += [getattr(kind, method, None) for method in ("dispatch", *kind.http_method_names)]
        yield from (each.ratelimits for each in decorated if isinstance(getattr(each, "ratelimits", None), tuple))
