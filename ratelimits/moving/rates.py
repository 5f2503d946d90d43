"""Find the rates that a project has written for other libraries, make rules of them, and write these rules.

These are the throttles of Django REST framework (`of_throttles`) and the decorators of django-ratelimit
(`of_decorators`). The module imports DRF only if the project has done so: a project without DRF perhaps cannot.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.text import slugify

from ratelimits import as_code
from ratelimits.algorithms import typed_rates
from ratelimits.models import Rule
from ratelimits.models.fields.rule_fields import IPV4_PREFIX, IPV6_PREFIX
from ratelimits.models.fields.scopes import SCOPE
from ratelimits.models.fields.view_key_texts import source_of
from ratelimits.moving import FoundView, views
from ratelimits.progress import Progress

#: Maximum characters of a rule's name.
_LONGEST_NAME = 40
#: A rule can replace a throttle if the throttle has these methods from one of these modules. Otherwise the project has
#: written one of the methods itself.
_THROTTLE_METHODS = ("allow_request", "get_cache_key", "get_ident", "get_rate")
_THROTTLE_MODULES = {"rest_framework.throttling", "ratelimits.throttling.by_rates"}
#: The module of django-ratelimit's decorator. Before its version 4 the package was called `ratelimit`.
_DECORATOR_MODULES = {"django_ratelimit.decorators", "ratelimit.decorators"}
#: The rule's kind of key, for each key of django-ratelimit that a rule can count without the help of the view.
_KINDS = {"ip": "ip", "user": "user", "user_or_ip": "caller"}
#: The sources from which django-ratelimit takes a key, each with its name in the argument `key` of `limited`.
_SOURCES = {"header": "header", "get": "query", "post": "field"}
#: A rate whose time has no unit, such as "5/60" or "5/".
_NO_UNIT = re.compile(r"[0-9]+/[0-9]*")


class PlannedImport(NamedTuple):
    """A finding, and what an import does with it.

    sentence  the rule that replaces the found rate, in words; "" if no rule can replace it
    exists    whether a default rule already has the name of this rule. The import then does not write the rule
    """

    finding: Finding
    sentence: str
    exists: bool


def plan(using: str) -> list[PlannedImport]:
    """Return each rate that was found in the project, with the rule that replaces the rate."""
    all_views = views()
    findings = with_names([*of_throttles(all_views), *of_decorators(all_views)])
    existing = set(Rule.objects.using(using).filter(plan=None).values_list("name", flat=True))
    return [
        PlannedImport(finding, "", False)
        if finding.rule is None
        else PlannedImport(finding, Rule(**finding.rule).sentence(), finding.rule["name"] in existing)
        for finding in findings
    ]


def write(planned: list[PlannedImport], using: str, progress: Progress | None = None) -> list[str]:
    """Write the rules that do not exist yet, in one edit. Return a text for each of them.

    `progress` shows how many rules are done. If a rule is not valid, write nothing and raise as_code.RefusedError.
    """
    entries = [one.finding.rule for one in planned if one.finding.rule is not None and not one.exists]
    return as_code.load({"plans": {}, "rules": entries}, using, reason="ratelimits_import", progress=progress)


@dataclass(frozen=True, slots=True)
class Finding:
    """A rate that was found in a project.

    found   the rate as the project writes it
    where   the views that it limits
    rule    the rule that replaces the rate, as an entry of rules as code (see the package as_code); None if no rule can
            replace the rate
    notes   how the rule differs from the rate, what to change in the code, or why there is no rule
    """

    found: str
    where: tuple[str, ...]
    rule: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def is_scope(text: str) -> bool:
    """Return whether a rule can name this scope."""
    found = SCOPE.fullmatch(text)
    return found is not None and found["methods"] is None


def with_names(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings that differ only in their views. Then give each rule a unique name, made from its present name."""
    joined: list[Finding] = []
    for finding in findings:
        index = next((index for index, other in enumerate(joined) if _same(finding, other)), None)
        if index is None:
            joined.append(finding)
        else:
            where = tuple(dict.fromkeys((*joined[index].where, *finding.where)))
            joined[index] = replace(joined[index], where=where)
    names: set[str] = set()
    return [_with_name(finding, names) for finding in joined]


def _same(one: Finding, other: Finding) -> bool:
    return (one.found, one.rule, one.notes) == (other.found, other.rule, other.notes)


def _with_name(finding: Finding, names: set[str]) -> Finding:
    if finding.rule is None:
        return finding
    start = slugify(finding.rule["name"]) or "rate"
    name, number = start[:_LONGEST_NAME], 1
    while name in names:
        number += 1
        name = f"{start[: _LONGEST_NAME - 4]}-{number}"  # The four characters are for the hyphen and the number.
    names.add(name)
    return replace(finding, rule={**finding.rule, "name": name})


def of_throttles(views: Iterable[FoundView]) -> Iterator[Finding]:
    """Yield the rates of all throttles of the views, and rates of DEFAULT_THROTTLE_RATES that no throttle uses.

    `views` are all views of the project, so the modules of the views are imported.
    """
    if "rest_framework.settings" not in sys.modules:
        return
    api_settings = import_module("rest_framework.settings").api_settings
    throttling = _throttling()
    api_views = [view for view in views if isinstance(view.option("throttle_classes"), (list, tuple))]
    defaults = list(api_settings.DEFAULT_THROTTLE_CLASSES)
    classes = dict.fromkeys([*defaults, *(one for view in api_views for one in view.option("throttle_classes"))])
    used: set[str] = set()
    for throttle in classes:
        if not issubclass(throttle, throttling.SimpleRateThrottle):
            continue  # QuotaThrottle, for example
        throttled = [view for view in api_views if throttle in view.option("throttle_classes")]
        if issubclass(throttle, throttling.ScopedRateThrottle):
            found = list(_scoped(throttle, throttled))
            used |= {str(view.option("throttle_scope")) for view in throttled}
        else:
            found = [_unscoped(throttle, throttled, api_views, everywhere=throttle in defaults)]
            used.add(str(throttle.scope))
        yield from found
    for scope, rate in (api_settings.DEFAULT_THROTTLE_RATES or {}).items():
        if rate is not None and scope not in used:
            note = (
                "No throttle of a view uses this rate. If you have removed the throttle, restore it and import again."
            )
            yield Finding(f"{scope}: {rate}", ("DEFAULT_THROTTLE_RATES",), None, (note,))
    for view in api_views:
        if view.cls.get_throttles.__module__ != "rest_framework.views":
            note = "The view chooses its throttles in get_throttles. Rates that only this method names are not found."
            yield Finding("get_throttles", (view.name,), None, (note,))


def _throttling() -> Any:
    return import_module("rest_framework.throttling")


def _unscoped(
    throttle: type[Any], throttled: list[FoundView], api_views: list[FoundView], *, everywhere: bool
) -> Finding:
    """Return the finding of a throttle that has one scope for all its views.

    `throttled` are the views with this throttle. `everywhere` says whether all views have the throttle by default.
    """
    where = ("all views by default",) if everywhere else tuple(view.name for view in throttled)
    finding = _with_rate(throttle, str(throttle.scope), where)
    if finding.rule is None:
        return finding
    if issubclass(throttle, _throttling().AnonRateThrottle):
        per_address = {"key_kind": "ip", "callers": "anonymous"}
        finding = replace(finding, rule={**finding.rule, **per_address})
    if everywhere:
        return _for_all(finding, throttled, [view for view in api_views if view not in throttled])
    scopes = {view.option("throttle_scope") for view in throttled}
    if scopes - {throttle.scope, None}:
        note = "Some of these views have another throttle_scope. A view has one scope, so write a rule for each scope."
        return replace(finding, rule=None, notes=(note,))
    note = f"Give these views throttle_scope = {throttle.scope!r}."
    if any(view.is_action for view in throttled):
        note += (
            f" For an action: @action(…, throttle_scope={throttle.scope!r}), and throttle_scope = None in its class."
        )
    notes = (*finding.notes, note) if None in scopes else finding.notes
    return replace(finding, rule={**(finding.rule or {}), "scope": throttle.scope}, notes=notes)


def _for_all(finding: Finding, throttled: list[FoundView], others: list[FoundView]) -> Finding:
    """Return the finding of a throttle that all views have by default.

    `others` are the views without this throttle. The rule excepts the scopes that only `others` have. It still limits
    those of `others` that have no excepted scope. A note names them.
    """
    # A view without any throttle does not ask for decisions, so no rule limits it.
    others = [view for view in others if view.option("throttle_classes")]
    scopes_of_others = {str(view.option("throttle_scope") or "") for view in others}
    scopes_of_throttled = {str(view.option("throttle_scope")) for view in throttled}
    excepted = sorted(scope for scope in scopes_of_others - scopes_of_throttled if is_scope(scope))
    rule = dict(finding.rule or {})
    if excepted:
        rule["except_scopes"] = ", ".join(excepted)
    limited_too = [view.name for view in others if view.option("throttle_scope") not in excepted]
    note = (
        f"The rule also limits {', '.join(limited_too)}. If it should not, give each of these views a throttle_scope,"
        " and add this scope to “except in scopes” of this rule."
    )
    return replace(finding, rule=rule, notes=(*finding.notes, note) if limited_too else finding.notes)


def _scoped(throttle: type[Any], throttled: list[FoundView]) -> Iterator[Finding]:
    """Yield a finding for each `throttle_scope` of the views that have this throttle."""
    by_scope: dict[str, list[str]] = {}
    for view in throttled:
        if view.option("throttle_scope"):
            by_scope.setdefault(str(view.option("throttle_scope")), []).append(view.name)
    for scope, names in by_scope.items():
        where = tuple(dict.fromkeys(names))
        if scope not in throttle.THROTTLE_RATES:
            yield Finding(f"throttle_scope {scope!r}", where, None, ("DEFAULT_THROTTLE_RATES has no such scope.",))
            continue
        finding = _with_rate(throttle, scope, where)
        yield finding if finding.rule is None else replace(finding, rule={**finding.rule, "scope": scope})


def _with_rate(throttle: type[Any], scope: str, where: tuple[str, ...]) -> Finding:
    """Return the finding of a throttle for a scope. Its rule names no scope yet, so it applies to all views."""
    name = f"{throttle.__module__}.{throttle.__qualname__}"
    rate = getattr(throttle, "rate", None) or (throttle.THROTTLE_RATES or {}).get(scope)
    found = f"{scope}: {rate}"
    own = [method for method in _THROTTLE_METHODS if getattr(throttle, method).__module__ not in _THROTTLE_MODULES]
    if own:
        return Finding(found, where, None, (f"{name} decides in code of its own: {', '.join(own)}.",))
    if rate is None:
        return Finding(found, where, None, (f"{name} has no rate, so it limits nothing.",))
    if not is_scope(scope):
        return Finding(found, where, None, ("A rule cannot name this scope: it has a space, a comma, a colon or *.",))
    try:
        # Call no `__init__`: it would need a rate for the scope of this class.
        requests, seconds = throttle.parse_rate(object.__new__(throttle), rate)
        capacity, period = int(requests), float(seconds)
    except (ImproperlyConfigured, ValueError, KeyError, TypeError, IndexError) as error:
        return Finding(found, where, None, (f"{name} cannot read this rate: {error!r}",))
    rule = {
        "name": scope,
        "algorithm": "sliding_log",
        "capacity": capacity,
        "period": int(period) if not period % 1 else period,
    }
    return Finding(found, where, rule, _read_otherwise(rate, capacity, period))


def _read_otherwise(rate: str, capacity: int, period: float) -> tuple[str, ...]:
    """Return a note if the project's throttle reads a rate in another way than this app. Else return an empty tuple."""
    try:
        permits, seconds = typed_rates.rate(rate)
        if permits == capacity and float(seconds) == period:
            return ()
    except ValueError:
        pass
    return (f"Django REST framework reads this rate as {capacity} per {period:g} seconds, and so does the rule.",)


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
        if function.__globals__.get("__name__") in _DECORATOR_MODULES:
            yield closure
        # Django's `method_decorator` has a list of the decorators, the outermost first, or a single decorator.
        decorators = closure.get("decorators", ())
        for decorator in decorators if isinstance(decorators, (list, tuple)) else (decorators,):
            if inspect.isfunction(decorator) and decorator.__globals__.get("__name__") in _DECORATOR_MODULES:
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
