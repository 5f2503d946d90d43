"""Find the decorators of django-ratelimit on the views of a project."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from django.conf import settings

from ratelimits.algorithms import typed_rates
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.models.fields.view_key_texts import source_of
from ratelimits.moving.finding import Finding
from ratelimits.moving.views import FoundView

#: The module of django-ratelimit's decorator. Before its version 4 the package was called `ratelimit`.
_MODULES = {"django_ratelimit.decorators", "ratelimit.decorators"}
#: The rule's kind of key, for each key of django-ratelimit that a rule can count without the help of the view.
_KINDS = {"ip": "ip", "user": "user", "user_or_ip": "caller"}
#: The sources from which django-ratelimit takes a key, each with its name in the argument `key` of `limited`.
_SOURCES = {"header": "header", "get": "query", "post": "field"}
#: A rate whose time has no unit, such as "5/60" or "5/".
_NO_UNIT = re.compile(r"[0-9]+/[0-9]*")


class _DecoratedFunction(NamedTuple):
    """A decorated function: its path in Python, the path of its module, and the decorator's arguments."""

    name: str
    module: str
    arguments: Mapping[str, Any]

    @property
    def short_name(self) -> str:
        """Return the name without the module, such as "login" or "Login-post"."""
        return self.name.removeprefix(f"{self.module}.").replace(".", "-")


def of_decorators(views: Iterable[FoundView]) -> Iterator[Finding]:
    """Yield a finding for each decorator of django-ratelimit. The outermost decorator of a view comes first."""
    decorated = [one for view in views for one in _of_view(view)]
    modules: dict[str, set[str]] = {}
    for one in decorated:
        modules.setdefault(one.short_name, set()).add(one.module)
    scopes = [_scope(one, with_app=len(modules[one.short_name]) > 1) for one in decorated]
    #: By scope: the keys that the views of this scope give.
    view_keys: dict[str, list[str]] = {}
    for one, scope in zip(decorated, scopes, strict=True):
        view_key = _view_key(one.arguments.get("key"), scope)
        keys = view_keys.setdefault(scope, [])
        # All lambdas of a module have the same name, so only the first key of a list can be one.
        if view_key and view_key not in keys and (not keys or _is_text(view_key)):
            keys.append(view_key)
    for one, scope in zip(decorated, scopes, strict=True):
        yield _finding(one, scope, view_keys[scope])


def _scope(decorated: _DecoratedFunction, *, with_app: bool) -> str:
    """Return a scope for a view: the decorator's group, or the name of the view.

    If several modules have a view with this name, each of these views needs a different scope. Then `with_app` adds the
    name of the app to the name of the view.
    """
    _package, _dot, app = decorated.module.removesuffix(".views").rpartition(".")
    name = f"{app}-{decorated.short_name}" if with_app else decorated.short_name
    # Replace the characters that a scope cannot have.
    return re.sub(r"[\s:,*]+", "-", decorated.arguments.get("group") or name)


def _view_key(key: Any, scope: str) -> str:
    """Return, as Python code, the argument `key` of `limited` that replaces a key of django-ratelimit.

    Return "" if `limited` needs no argument `key`, or if django-ratelimit does not know the key.
    """
    if callable(key) or (isinstance(key, str) and "." in key and ":" not in key):
        function = key if isinstance(key, str) else _shown(key)
        return f"lambda request: {function}({scope!r}, request)"
    source, colon, name = str(key).partition(":")
    return f'"{_SOURCES[source]}:{name}"' if colon and source in _SOURCES else ""


def _is_text(view_key: str) -> bool:
    """Return whether the result of `_view_key` is a text such as "header:X-Tenant", not a function."""
    return view_key.startswith('"')


def _of_view(view: FoundView) -> Iterator[_DecoratedFunction]:
    """Yield each decorator of a view, and of the methods of its class."""
    seen: set[int] = set()
    module = (view.cls or view.view).__module__
    for arguments in _arguments(view.view, seen):
        yield _DecoratedFunction(view.name, module, arguments)
    if view.cls is not None:
        for method in ("dispatch", *view.cls.http_method_names):
            name = view.name if method == "dispatch" else f"{view.name}.{method}"
            for arguments in _arguments(getattr(view.cls, method, None), seen):
                yield _DecoratedFunction(name, module, arguments)


def _arguments(function: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of each decorator around a function. `seen` has the ids of functions to leave out."""
    while inspect.isfunction(function) and id(function) not in seen:
        seen.add(id(function))
        closure = inspect.getclosurevars(function).nonlocals
        # The wrapper that the decorator returns is a function of the decorator's module. The wrapper's closure has the
        # arguments of the decorator.
        if function.__globals__.get("__name__") in _MODULES:
            yield closure
        # Django's `method_decorator` has a list of the decorators, the outermost first, or a single decorator.
        decorators = closure.get("decorators", ())
        for decorator in decorators if isinstance(decorators, (list, tuple)) else (decorators,):
            if inspect.isfunction(decorator) and decorator.__globals__.get("__name__") in _MODULES:
                yield inspect.getclosurevars(decorator).nonlocals
        function = getattr(function, "__wrapped__", None)


def _finding(decorated: _DecoratedFunction, scope: str, view_keys: list[str]) -> Finding:
    """Return the finding of a decorator. `view_keys` are the keys that the scope's views give."""
    name, arguments = decorated.name, decorated.arguments
    key, rate = arguments.get("key"), arguments.get("rate")
    found = f"@ratelimit(key={_shown(key)}, rate={_shown(rate)})"
    own_key = _view_key(key, scope)
    if own_key and own_key not in view_keys:
        note = (
            "@limited lists keys by their names, and all lambdas have the same name. Write a function with `def` that"
            " takes the request, add it to the list, and make a rule that counts its key (call: and its dotted path)."
        )
        return Finding(found, (name,), None, (note,))
    if not own_key and str(key) not in _KINDS:
        return Finding(found, (name,), None, ("django-ratelimit does not know this key.",))
    if rate is None:
        return Finding(found, (name,), None, ("It has no rate, so it limits nothing.",))
    # A rate is a text such as "5/m" or a tuple. Any other text is the path of a function that calculates the rate.
    is_rate = isinstance(rate, tuple) or (isinstance(rate, str) and re.match(r"[0-9]+/", rate))
    if not is_rate:
        note = "The rate is calculated for each request. Write a rule with the usual rate, and plans or overrides."
        return Finding(found, (name,), None, (note,))
    try:
        capacity, period = _parsed(rate)
    except ValueError as error:
        return Finding(found, (name,), None, (f"The rate cannot be read: {error}",))
    methods = _methods(arguments.get("method"))
    rule = {
        "name": scope,
        "algorithm": "fixed_window",
        "capacity": capacity,
        "period": period,
        "scope": f"{scope}:{','.join(methods)}" if methods else scope,
        "key_kind": "view_key" if own_key else _KINDS[str(key)],
    }
    if len(view_keys) > 1 and own_key and _is_text(own_key):
        rule["view_key"] = source_of(own_key.strip('"')).text
    if key == "ip":
        rule |= {field: mask for field, mask in _prefixes() if mask is not None}
    listed = view_keys[0] if len(view_keys) == 1 else f"[{', '.join(view_keys)}]"
    key_argument = f", key={listed}" if view_keys else ""
    notes = [f'Write @limited("{scope}"{key_argument}) instead of the decorator.']
    if key == "user":
        notes.append("The rule does not count anonymous clients. django-ratelimit counts them all together.")
    if not arguments.get("block", True):
        rule["mode"] = "shadow"
        notes.append("block=False only sets request.limited, so the rule is in shadow mode: it refuses nothing.")
    return Finding(found, (name,), rule, tuple(notes))


def _shown(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if inspect.isfunction(value) else repr(value)


def _parsed(rate: str | tuple[int, int]) -> tuple[int, int]:
    """Return the number of requests and the seconds of a rate. A time without a unit is in seconds."""
    if isinstance(rate, tuple):
        return int(rate[0]), int(rate[1])
    text = f"{rate}s" if _NO_UNIT.fullmatch(rate) else rate
    permits, period = typed_rates.rate(text)
    return int(permits), int(period)


def _prefixes() -> Iterator[tuple[str, int | None]]:
    """Yield the two prefix fields of a rule, with the lengths that the settings of django-ratelimit give.

    If a setting has the rule's default length, or a length that a rule cannot have, the length is None.
    """
    for field, setting, default in (
        ("ipv4_prefix", "RATELIMIT_IPV4_MASK", IPV4_PREFIX),
        ("ipv6_prefix", "RATELIMIT_IPV6_MASK", IPV6_PREFIX),
    ):
        mask = getattr(settings, setting, default)
        yield field, mask if 0 < mask < default else None


def _methods(method: Any) -> tuple[str, ...]:
    """Return the methods that a decorator counts, in order. If it counts all methods, return an empty tuple."""
    named = [method] if isinstance(method, str) else list(method or ())
    return tuple(sorted({one.upper() for one in named if isinstance(one, str)}))
