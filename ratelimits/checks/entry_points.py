"""System checks of the entry points: whether the throttle class, the middleware and the decorator can do their work."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.utils.module_loading import import_string

from ratelimits import unknown_names
from ratelimits.checks import listed
from ratelimits.checks.paths import views_below
from ratelimits.conf import conf, shown
from ratelimits.middleware import QuotaMiddleware, paths_with_options
from ratelimits.models import Rule
from ratelimits.moving import FoundView, views
from ratelimits.quota.costs import check_bounds
from ratelimits.status import additions
from ratelimits.unknown_names import all_patterns, decorated_functions
from ratelimits.view_keys import check_key

_THROTTLE = "ratelimits.throttling.QuotaThrottle"
#: A project that imports one of these modules asks for decisions, although its settings and views do not show this.
_OTHER_ENTRY_POINTS = ("ratelimits.ninja", "ratelimits.outbound")
#: The middlewares that set `request.user`. They have names, because a project without users cannot import Django's.
_AUTHENTICATION = frozenset(
    {
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.auth.middleware.RemoteUserMiddleware",
        "oauth2_provider.middleware.OAuth2TokenMiddleware",
        "sesame.middleware.AuthenticationMiddleware",
    }
)


@checks.register("ratelimits")
def check_throttles(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of other throttles besides `QuotaThrottle`. DRF runs all throttles, even after one of them has refused."""
    if not _has_quota_throttle_by_default() or len(_default_throttles()) == 1:
        return []
    return [
        checks.Warning(
            "DEFAULT_THROTTLE_CLASSES has other throttles beside QuotaThrottle.",
            hint="A request that another throttle refuses is still charged and billed: replace the other throttles by"
            " rules.",
            id="ratelimits.W001",
        )
    ]


@checks.register("ratelimits")
def check_rates(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error for each rate in DEFAULT_THROTTLE_RATES that the throttle classes of this app cannot read.

    Without this check, the first request of a view would raise the error.
    """
    throttle = next((one for one in _default_throttles() if _is_throttle(one, "SimpleRateThrottle")), None)
    return list(_wrong_rates(throttle)) if throttle is not None else []


def _wrong_rates(throttle: Any) -> Iterator[checks.Error]:
    for scope, rate in (throttle.THROTTLE_RATES or {}).items():
        try:
            # Call no `__init__`: it would need a rate for the scope of this class.
            throttle.parse_rate(object.__new__(throttle), rate)
        except ImproperlyConfigured as error:
            _name, _colon, hint = str(error).partition(": ")
            message = f"REST_FRAMEWORK['DEFAULT_THROTTLE_RATES'][{scope!r}] is {shown(rate)}."
            yield checks.Error(message, hint=hint, id="ratelimits.E009")


@checks.register("ratelimits")
def check_middleware(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if requests are decided, but the project does not use `QuotaMiddleware`, which finishes requests."""
    if any(map(_finishes, settings.MIDDLEWARE)):
        return []
    reason = next(_reasons_to_decide(), "")
    if not reason:
        return []
    return [
        checks.Warning(
            f"MIDDLEWARE has no QuotaMiddleware, but requests are decided: {reason}.",
            hint="Add 'ratelimits.middleware.QuotaMiddleware' after AuthenticationMiddleware. Without this middleware,"
            " PATHS are not limited, server errors are billed, and leases of interrupted requests last for their whole"
            " lease_ttl.",
            id="ratelimits.W002",
        )
    ]


@checks.register("ratelimits")
def check_order(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error if PATHS are limited before the user is known: users would be counted by their address."""
    first = next((index for index, path in enumerate(settings.MIDDLEWARE) if _finishes(path)), None)
    if first is None or not _paths():
        return []
    late = [path for path in settings.MIDDLEWARE[first + 1 :] if _authenticates(path)]
    if not late:
        return []
    return [
        checks.Error(
            f"MIDDLEWARE has {settings.MIDDLEWARE[first]!r} before {listed([repr(path) for path in late])}, so"
            " RATELIMITS['PATHS'] is limited before the user is known: users are counted and billed by their address,"
            " and no rule, plan or block of a user applies.",
            hint="Place QuotaMiddleware after all middlewares that authenticate. If only addresses are limited on"
            " purpose, add 'ratelimits.E052' to SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.E052",
        )
    ]


def _finishes(path: str) -> bool:
    """Return whether this path of MIDDLEWARE is QuotaMiddleware."""
    return _is_subclass(_imported(path), QuotaMiddleware)


def _authenticates(path: str) -> bool:
    """Return whether this path of MIDDLEWARE is a class that sets `request.user`, or a subclass of one."""
    bases = getattr(_imported(path), "__mro__", ())
    return any(f"{base.__module__}.{base.__qualname__}" in _AUTHENTICATION for base in bases)


def _imported(path: str) -> object:
    """Return the middleware of a path; None if the path is wrong, which Django itself reports."""
    try:
        return import_string(path)
    except ImportError:
        return None


@checks.register("ratelimits")
def check_views(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of views that no rule limits, because they have other throttles: of DRF, or with rates in code."""
    # With the option `api_views`, the middleware limits these views too.
    if not _has_quota_throttle_by_default() or any(options.get("api_views") for options in _options_of_paths()):
        return []
    rated = {view.name: _has_rates_in_code(view) for view in _views() if _has_other_throttles(view)}
    return [
        *_without_rules("they have throttles of Django REST framework", rated, is_rated=False, number="W005"),
        *_without_rules("their throttles have rates in code", rated, is_rated=True, number="W011"),
    ]


def _without_rules(reason: str, rated: Mapping[str, bool], *, is_rated: bool, number: str) -> Iterator[checks.Warning]:
    """Yield a warning of the views that no rule limits for this reason. `rated` are all such views."""
    names = [name for name, has_rates in rated.items() if has_rates is is_rated]
    if names:
        yield checks.Warning(
            f"No rule limits these views, because {reason}: {listed(names)}.",
            hint="Delete throttle_classes in these views: they then have QuotaThrottle. Write rules instead of the"
            " throttles; `manage.py ratelimits_import` shows these rules. To keep the throttles, add"
            f" 'ratelimits.{number}' to SILENCED_SYSTEM_CHECKS.",
            id=f"ratelimits.{number}",
        )


@checks.register("ratelimits")
def check_api_views_of_paths(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of views of DRF below PATHS that nothing limits: the middleware leaves them to their throttles."""
    if _has_quota_throttle_by_default():
        return []  # A view without this throttle then has its own throttle_classes, or W005 names it.
    left, limited = set[int](), set[int]()
    patterns = all_patterns() if _paths() and getattr(settings, "ROOT_URLCONF", None) else []
    for path, options in paths_with_options(_paths()) if patterns else ():
        below = {id(pattern.callback) for pattern in views_below(patterns, path)}
        (limited if options.get("api_views") else left).update(below)
    names = [view.name for view in _views() if id(view.view) in left - limited and _has_no_limit(view)]
    if not names:
        return []
    return [
        checks.Warning(
            f"RATELIMITS['PATHS'] does not limit these views of Django REST framework: {listed(names)}.",
            hint=f"Set REST_FRAMEWORK['DEFAULT_THROTTLE_CLASSES'] = ['{_THROTTLE}'], which knows the users and API keys"
            " of these views; or give the path the option 'api_views', with which the middleware limits them before"
            " they authenticate the caller. If they need no limit, add 'ratelimits.W014' to SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.W014",
        )
    ]


def _has_no_limit(view: FoundView) -> bool:
    # Only Django REST framework gives its views the attribute `cls`.
    return hasattr(view.view, "cls") and not (_throttles(view) or _chooses_throttles(view) or _is_decorated(view))


@checks.register("ratelimits")
def check_view_keys(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error for each `throttle_key` that is not valid. Without this check, the first request would raise it.

    No function is called.
    """
    return [
        checks.Error(
            f"The throttle_key of {view.name} is not valid.", hint=str(error), obj=view.name, id="ratelimits.E011"
        )
        for view in _views()
        for key in _view_keys(view)
        if (error := _key_error(key)) is not None
    ]


def _view_keys(view: FoundView) -> Iterator[Any]:
    """Yield the keys that a view and its throttles give. Leave out a key that is computed for each request."""
    for value in (_attribute(view, "throttle_key"), *(getattr(one, "throttle_key", None) for one in _throttles(view))):
        if value is not None and not isinstance(value, property):
            yield value


def _key_error(key: Any) -> ImproperlyConfigured | None:
    try:
        check_key(key)
    except ImproperlyConfigured as error:
        return error
    return None


@checks.register("ratelimits")
def check_costs(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error for each view whose cost, or the bounds of whose cost, each request would find wrong."""
    return [
        checks.Error(f"The cost of {view.name} is not valid.", hint=hint, obj=view.name, id="ratelimits.E012")
        for view in _views()
        if (hint := _cost_error(_attribute(view, "throttle_cost"), _attribute(view, "throttle_cost_bounds")))
    ]


def _attribute(view: FoundView, name: str) -> Any:
    return view.option(name) if view.cls is not None else getattr(view.view, name, None)


def _cost_error(cost: Any, bounds: Any) -> str:
    """Return what is wrong with a cost and its bounds; "" if nothing is, or if they are computed for each request."""
    if isinstance(bounds, property):
        return ""
    try:
        check_bounds(bounds, "throttle_cost_bounds")
        for meter, value in (cost if isinstance(cost, Mapping) else {"requests": cost}).items():
            if isinstance(value, str) and meter not in (bounds or {}):
                return f"throttle_cost_bounds has no bounds for {shown(meter)}, whose cost is {shown(value)}."
            if isinstance(value, str):
                check_key(value)
    except ImproperlyConfigured as error:
        return str(error)
    return ""


@checks.register("ratelimits", checks.Tags.database)
def check_use(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Warn if there are rules, but no setting and no view uses them. Do nothing without `--database`."""
    try:
        using = conf.DATABASE
        if using not in (databases or ()) or next(_reasons_to_decide(), None) is not None:
            return []
        # Usage shows that the project's own code asks for decisions.
        used = any(one.table._base_manager.using(using).exists() for one in additions.used_keys())
        if used or any(name in sys.modules for name in _OTHER_ENTRY_POINTS):
            return []
        rules = Rule.objects.using(using).exclude(mode=Rule.Mode.OFF).count()
    except (DatabaseError, ImproperlyConfigured):
        return []  # The tables do not exist yet, or another check reports the settings.
    if not rules:
        return []
    return [
        checks.Warning(
            f"The rules of the database ({rules}) limit nothing: no setting and no view uses QuotaThrottle, the"
            " middleware or the decorator.",
            hint=f"Set REST_FRAMEWORK['DEFAULT_THROTTLE_CLASSES'] = ['{_THROTTLE}'], or RATELIMITS['PATHS'], or"
            " decorate views with ratelimits.decorators.limited.",
            id="ratelimits.W022",
        )
    ]


def _reasons_to_decide() -> Iterator[str]:
    """Yield the reasons why requests are decided: settings and views.

    The settings come first, since reading them is fast.
    """
    if _has_quota_throttle_by_default():
        yield "REST_FRAMEWORK['DEFAULT_THROTTLE_CLASSES'] names QuotaThrottle"
    if _paths():
        yield "RATELIMITS['PATHS'] is set"
    for view in _views():
        if _is_decorated(view) or any(_is_throttle(one, "QuotaThrottle") for one in _throttles(view)):
            yield f"the view {view.name}"
    if unknown_names.all_given():
        yield "a function has the decorator `limited`"


def _default_throttles() -> list[Any]:
    paths = (getattr(settings, "REST_FRAMEWORK", None) or {}).get("DEFAULT_THROTTLE_CLASSES") or ()
    try:
        return [import_string(path) if isinstance(path, str) else path for path in paths]
    except ImportError:
        return []  # Django REST framework itself reports a class that cannot be imported.


def _has_quota_throttle_by_default() -> bool:
    return any(_is_throttle(one, "QuotaThrottle") for one in _default_throttles())


def _paths() -> list[str] | dict[str, dict[str, Any]]:
    """Return PATHS, or an empty list if PATHS is not valid. `check_settings` reports the invalid value."""
    try:
        return conf.PATHS
    except ImproperlyConfigured:
        return []


def _options_of_paths() -> list[Mapping[str, Any]]:
    return [options for _path, options in paths_with_options(_paths())]


def _views() -> list[FoundView]:
    return views() if getattr(settings, "ROOT_URLCONF", None) else []


def _throttles(view: FoundView) -> Sequence[object]:
    return view.option("throttle_classes") or ()


def _is_decorated(view: FoundView) -> bool:
    return next(decorated_functions(view.view), None) is not None


def _has_other_throttles(view: FoundView) -> bool:
    """Return whether a view has throttles with rates, and neither `QuotaThrottle` nor the decorator."""
    throttles = _throttles(view)
    framework = sys.modules.get("rest_framework.throttling")
    is_limited = _is_decorated(view) or any(_is_throttle(one, "QuotaThrottle") for one in throttles)
    if framework is None or is_limited or _chooses_throttles(view):
        return False
    # The app's own SimpleRateThrottle is a subclass of the framework's class with this name.
    return any(_is_subclass(one, framework.SimpleRateThrottle) for one in throttles)


def _has_rates_in_code(view: FoundView) -> bool:
    """Return whether a view has a throttle of this app with a rate in code, such as its `ScopedRateThrottle`."""
    return any(_is_throttle(one, "SimpleRateThrottle") for one in _throttles(view))


def _chooses_throttles(view: FoundView) -> bool:
    """Return whether a view has its own `get_throttles`. Its attributes then do not say which throttles it uses."""
    method = getattr(view.cls, "get_throttles", None)
    return method is not None and method.__module__ != "rest_framework.views"


def _is_throttle(value: object, name: str) -> bool:
    """Return whether a value is this throttle class of the app, or a subclass of it.

    A project without Django REST framework cannot import these classes. If a project uses one of them, its module is
    already imported.
    """
    module = sys.modules.get("ratelimits.throttling")
    return module is not None and _is_subclass(value, getattr(module, name))


def _is_subclass(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
