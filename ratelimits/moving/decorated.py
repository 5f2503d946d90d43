"""Find the decorators of django-ratelimit on the views of a project."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from django.conf import settings

from ratelimits.algorithms import typed_rates
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.moving.finding import Finding
from ratelimits.moving.views import FoundView

#: The module of django-ratelimit's decorator. Before its version 4 the package was called `ratelimit`.
_MODULES = {"django_ratelimit.decorators", "ratelimit.decorators"}
#: For each key of django-ratelimit that a rule can count: the rule's kind of key.
_KINDS = {"ip": "ip", "user": "user", "user_or_ip": "key"}
_NO_UNIT = re.compile(r"[0-9]+/[0-9]*")


class _Decorated(NamedTuple):
    """A decorated function: its path in Python, the module's part of this path, and the decorator's arguments."""

    name: str
    module: str
    decorator: Mapping[str, Any]

    @property
    def short_name(self) -> str:
        """Return the name without the module, such as "login" or "Login-post"."""
        return self.name.removeprefix(f"{self.module}.").replace(".", "-")


def of_decorators(views: Iterable[FoundView]) -> Iterator[Finding]:
    """Yield the rate of each decorator of django-ratelimit. The outermost decorator of a view comes first."""
    decorated = [one for view in views for one in _decorated(view)]
    modules: dict[str, set[str]] = {}
    for one in decorated:
        modules.setdefault(one.short_name, set()).add(one.module)
    for one in decorated:
        # Views with the same name in several modules need scopes of their own.
        app = one.module.removesuffix(".views").rpartition(".")[2]
        scope = one.short_name if len(modules[one.short_name]) == 1 else f"{app}-{one.short_name}"
        yield _finding(one, scope)


def _decorated(view: FoundView) -> Iterator[_Decorated]:
    """Yield each decorator of a view, and of the methods of its class."""
    seen: set[int] = set()
    module = (view.cls or view.view).__module__
    for decorator in _decorators(view.view, seen):
        yield _Decorated(view.name, module, decorator)
    if view.cls is not None:
        for method in ("dispatch", *view.cls.http_method_names):
            name = view.name if method == "dispatch" else f"{view.name}.{method}"
            for decorator in _decorators(getattr(view.cls, method, None), seen):
                yield _Decorated(name, module, decorator)


def _decorators(function: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of the decorators around a function."""
    while inspect.isfunction(function) and id(function) not in seen:
        seen.add(id(function))
        closure = inspect.getclosurevars(function).nonlocals
        if function.__globals__.get("__name__") in _MODULES:
            yield closure
        # Django's `method_decorator` has a list of the decorators, the outermost first, or one decorator alone.
        several = closure.get("decorators", ())
        for decorator in several if isinstance(several, (list, tuple)) else (several,):
            if inspect.isfunction(decorator) and decorator.__globals__.get("__name__") in _MODULES:
                yield inspect.getclosurevars(decorator).nonlocals
        function = getattr(function, "__wrapped__", None)


def _finding(decorated: _Decorated, scope: str) -> Finding:
    """Return the finding of a decorator. `scope` is the scope of its rule, if the decorator names no group."""
    name, decorator = decorated.name, decorated.decorator
    key, rate = decorator.get("key"), decorator.get("rate")
    found = f"@ratelimit(key={_shown(key)}, rate={_shown(rate)})"
    if not isinstance(key, str) or key not in _KINDS:
        note = "A rule cannot count by this key: it counts by address, user, API key or account, or everyone together."
        return Finding(found, (name,), None, (note,))
    if not isinstance(rate, (str, tuple)) or (isinstance(rate, str) and not re.match(r"[0-9]+/", rate)):
        note = "The rate is calculated for each request. Write a rule with the usual rate, and plans or overrides."
        return Finding(found, (name,), None, (note if rate is not None else "Without a rate it limits nothing.",))
    try:
        capacity, period = _parsed(rate)
    except ValueError as error:
        return Finding(found, (name,), None, (f"The rate cannot be read: {error}",))
    scope = re.sub(r"[\s:,*]+", "-", decorator.get("group") or scope)
    methods = _methods(decorator.get("method"))
    rule = {
        "name": scope,
        "algorithm": "fixed_window",
        "capacity": capacity,
        "period": period,
        "scope": f"{scope}:{','.join(methods)}" if methods else scope,
        "key_kind": _KINDS[key],
    }
    if key == "ip":
        rule |= {field: mask for field, mask in _prefixes() if mask is not None}
    notes = [f'Write @limited("{scope}") instead of the decorator.']
    if key == "user":
        notes.append("The rule does not count anonymous clients. django-ratelimit counts them all together.")
    if not decorator.get("block", True):
        rule["mode"] = "shadow"
        notes.append("block=False only sets request.limited, so the rule is in shadow mode: it refuses nothing.")
    return Finding(found, (name,), rule, tuple(notes))


def _shown(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if inspect.isfunction(value) else repr(value)


def _parsed(rate: str | tuple[int, int]) -> tuple[int, int]:
    """Return the number of requests and the seconds of a rate. Without a unit, the time is in seconds."""
    if isinstance(rate, tuple):
        return int(rate[0]), int(rate[1])
    text = f"{rate}s" if _NO_UNIT.fullmatch(rate) else rate
    permits, period = typed_rates.rate(text, m_is_minute=True)
    return int(permits), int(period)


def _prefixes() -> Iterator[tuple[str, int | None]]:
    """Yield the prefix lengths of addresses that the settings of django-ratelimit give, if a rule can have them."""
    for field, setting, default in (
        ("ipv4_prefix", "RATELIMIT_IPV4_MASK", IPV4_PREFIX),
        ("ipv6_prefix", "RATELIMIT_IPV6_MASK", IPV6_PREFIX),
    ):
        mask = getattr(settings, setting, default)
        yield field, mask if 0 < mask < default else None


def _methods(method: Any) -> tuple[str, ...]:
    """Return the methods that a decorator counts, in order; none stands for all."""
    named = [method] if isinstance(method, str) else list(method or ())
    return tuple(sorted({one.upper() for one in named if isinstance(one, str)}))
