"""List the views of the project's URLconf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.urls import URLPattern, URLResolver, get_resolver


class FoundView(NamedTuple):
    """A view of the URLconf.

    name      its path in Python, such as "shop.views.Search"
    view      the function that the URLconf names
    cls       the view's class; None for a function
    """

    name: str
    view: Any
    cls: Any

    def option(self, name: str) -> Any:
        """Return an attribute of the view's class, or the value that `as_view` or an action of a ViewSet gives."""
        options: dict[str, Any] = getattr(self.view, "initkwargs", None) or getattr(self.view, "view_initkwargs", {})
        return options.get(name, getattr(self.cls, name, None))


def views() -> list[FoundView]:
    """Return all views of ROOT_URLCONF, each once."""
    found = {(view.name, id(view.view)): view for view in _views(get_resolver().url_patterns)}
    return sorted(found.values(), key=lambda view: view.name)


def _views(patterns: list[URLPattern | URLResolver]) -> Iterator[FoundView]:
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _views(pattern.url_patterns)
            continue
        view: Any = pattern.callback
        cls = getattr(view, "cls", None) or getattr(view, "view_class", None)
        named = cls or view
        yield FoundView(f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}", view, cls)
