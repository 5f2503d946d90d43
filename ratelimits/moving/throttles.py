"""Find the throttles of Django REST framework that the views of a project have, with their rates.

The module imports DRF only if the project has done so: a project without DRF perhaps cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ratelimits.algorithms import typed_rates
from ratelimits.moving.finding import Finding, is_scope
from ratelimits.moving.views import FoundView

#: A rule can replace a throttle if the throttle has these methods from one of these modules. Otherwise the project has
#: written one of the methods itself.
_METHODS = ("allow_request", "get_cache_key", "get_ident", "get_rate")
_MODULES = {"rest_framework.throttling", "ratelimits.throttling.by_rates"}


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
    own = [method for method in _METHODS if getattr(throttle, method).__module__ not in _MODULES]
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
