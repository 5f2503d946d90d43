"""Move a project that uses other libraries: list the views of its URLconf, and make rules of its rates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.urls import URLPattern, URLResolver, get_resolver


class FoundView(NamedTuple):
    """A view of the URLconf.

    name      its path in Python, such as "shop.views.Search"; an extra action is "shop.views.Orders.newest"
    view      the function that the URLconf names
    cls       the view's class; None for a function
    """

    name: str
    view: Any
    cls: Any

    @property
    def is_action(self) -> bool:
        """Return whether this is an extra action of a ViewSet of Django REST framework."""
        return bool(_extra_action(self.view, self.cls))

    def option(self, name: str) -> Any:
        """Return an option of the view: the value given to `as_view` or to an action, else the class's attribute."""
        options: dict[str, Any] = getattr(self.view, "initkwargs", None) or getattr(self.view, "view_initkwargs", {})
        return options.get(name, getattr(self.cls, name, None))


def views() -> list[FoundView]:
    """Return all views of ROOT_URLCONF, without repetitions, sorted by name."""
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
        name = f"{named.__module__}.{_name(named)}"
        yield FoundView(".".join([name, *_extra_action(view, cls)]), view, cls)


def _name(named: Any) -> str:
    # The class that `api_view` makes has the function's name only as its `__name__`.
    if getattr(named, "__qualname__", "") == "WrappedAPIView":
        return str(named.__name__)
    return str(getattr(named, "__qualname__", type(named).__qualname__))


def _extra_action(view: Any, cls: Any) -> list[str]:
    """Return a list with the name of the extra action that a view of a ViewSet runs. It is empty for other views."""
    actions = dict.fromkeys((getattr(view, "actions", None) or {}).values())
    # The decorator `action` of Django REST framework sets `mapping` on a method.
    return [name for name in actions if hasattr(getattr(cls, name, None), "mapping")][:1]
