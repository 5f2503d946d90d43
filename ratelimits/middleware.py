"""The middleware. It limits plain Django views by path, and finishes every admitted request.

To finish a request means to refund it after a server error, and to end its leases (its places under a `concurrency`
limit). The middleware also finishes requests that the throttle or the decorator has admitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.core.signals import setting_changed
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve

from ratelimits.answers.answer import Answer
from ratelimits.answers.headers import kept_for_caller
from ratelimits.answers.responses import arefusal, refusal, with_headers
from ratelimits.conf import conf
from ratelimits.identity import aidentify, identify
from ratelimits.quota import finishing
from ratelimits.quota.costs import (
    ONE_REQUEST,
    CostOutOfBounds,
    WrongCost,
    costs_of,
    out_of_bounds,
    scope_of,
    wrong_cost,
)
from ratelimits.quota.waiting import acheck_and_wait, check_and_wait
from ratelimits.view_keys import AskedView, Key, awith_view_keys, with_view_keys

_NO_OPTIONS: Mapping[str, Any] = {}
_ATTRIBUTES = "throttle_scope", "throttle_cost", "throttle_key", "throttle_cost_bounds"
GetResponse = Callable[[HttpRequest], HttpResponseBase] | Callable[[HttpRequest], Awaitable[HttpResponseBase]]


class ViewLimits(NamedTuple):
    """How the middleware limits a request.

    scope      the scope of the request; "*" if neither its view nor its path names one
    costs      the cost in each meter, by the meter's name
    key        the place of the limited key in the request, such as "header:X-Tenant", or a function that returns the
               key, or a list of these; None if the view gives no key
    place      where this key is written, for messages
    arguments  the arguments in the URL
    view       the view of the URL; None if no view has this URL
    """

    scope: str
    costs: Mapping[str, int]
    key: Key | None
    place: str
    arguments: Mapping[str, Any]
    view: object

    def asked(self, request: HttpRequest) -> AskedView:
        """Return the request as the keys of its view need it."""
        return AskedView(request, self.arguments, (request,), self.view, self.place)


def limits_of(request: HttpRequest) -> ViewLimits | None:
    """Return how the middleware limits a request; None if it does not limit the request.

    The middleware limits only requests whose path begins with a path of RATELIMITS["PATHS"]. The prefix under which a
    server serves the project (SCRIPT_NAME) is not part of it. A view of DRF, or a view with the decorator, limits its
    requests itself, so usually the middleware does not limit these requests.

    If the path has the option `api_views`, the middleware limits the requests of all views, and uses only the options
    of the path. Without this option, it uses the view's attributes `throttle_scope`, `throttle_cost`,
    `throttle_cost_bounds` and `throttle_key`. For an attribute that does not exist, it uses the option of the path.

    Raise CostOutOfBounds if the client has chosen a cost that is not valid.
    """
    found = next((found for found in _paths() if request.path_info.startswith(found[0])), None)
    if found is None:
        return None
    prefix, options = found
    try:
        match = resolve(request.path_info, getattr(request, "urlconf", None))
    except Resolver404:  # no view has this URL: limit the request by the options of its path
        view, arguments = None, {}
    else:
        view, arguments = match.func, match.kwargs
        if _limits_itself(view, request) and not options.get("api_views"):
            return None
    # With `api_views`, the view perhaps limits the request once more, by its own attributes. So do not use them here.
    own = None if options.get("api_views") else view
    scope, cost, key, bounds = (_attribute(own, name) for name in _ATTRIBUTES)
    scope = scope or options.get("scope", "*")
    cost = options.get("cost") if cost is None else cost
    place = "throttle_key"
    if not key:
        key, place = options.get("key"), f"RATELIMITS['PATHS'][{prefix!r}]['key']"
    bounds = options.get("cost_bounds") if bounds is None else bounds
    costs = ONE_REQUEST if cost is None else costs_of(cost, request, bounds=bounds, arguments=arguments)
    return ViewLimits(scope if isinstance(scope, str) else scope_of(scope, view), costs, key, place, arguments, view)


@cache
def _paths() -> list[tuple[str, Mapping[str, Any]]]:
    """Return the paths of RATELIMITS["PATHS"] with their options. A longer path is first, or it would never be used."""
    return sorted(paths_with_options(conf.PATHS), key=lambda item: len(item[0]), reverse=True)


def paths_with_options(paths: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each path of a value of RATELIMITS["PATHS"], with its options."""
    return list(paths.items()) if isinstance(paths, Mapping) else [(path, _NO_OPTIONS) for path in paths]


def _forget_paths(*, setting: str, **kwargs: object) -> None:
    if setting == "RATELIMITS":
        _paths.cache_clear()


setting_changed.connect(_forget_paths)


def _attribute(view: Any, name: str) -> Any:
    """Return an attribute of a view: the value given to `as_view`, or else the one of its class or function."""
    given: Mapping[str, Any] = getattr(view, "view_initkwargs", _NO_OPTIONS)
    return given[name] if name in given else getattr(getattr(view, "view_class", view), name, None)


def _limits_itself(view: Any, request: HttpRequest) -> bool:
    """Return whether a view is one of DRF, or has the decorator, perhaps at the method of its class."""
    # DRF gives its views the attribute `cls`; the decorator adds `ratelimits`.
    if hasattr(view, "cls") or hasattr(view, "ratelimits"):
        return True
    view_class, method = getattr(view, "view_class", None), (request.method or "").lower()
    handler = getattr(view_class, method, None) or (getattr(view_class, "get", None) if method == "head" else None)
    return hasattr(handler, "ratelimits")


def _with_headers(response: HttpResponseBase, request: HttpRequest) -> HttpResponseBase:
    """Add the RateLimit fields of the last entry point that decided the request, if the response does not have them.

    An entry point behind the middleware cannot add them if its view raises an error: the framework makes the response.
    """
    answer = vars(request).get("quota")  # a project may use this name for something else
    return with_headers(response, answer) if isinstance(answer, Answer) else kept_for_caller(response)


class QuotaMiddleware:
    """The middleware that limits paths and finishes requests. Place it after `AuthenticationMiddleware`.

    If neither a view nor its path names a scope, the scope is "*".
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        self._async = iscoroutinefunction(get_response)
        if self._async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        if self._async:
            return self._answer(request)
        try:
            limited = limits_of(request)
        except CostOutOfBounds as error:
            return out_of_bounds(error)
        if limited is not None:
            identity = identify(request)
            if limited.key is not None:
                identity = with_view_keys(identity, limited.key, limited.asked(request))
            try:
                answer = check_and_wait(identity, limited.scope, request.method or "", limited.costs, request)
            except WrongCost as error:
                raise wrong_cost(error, limited.view) from None
            finishing.begin(request, answer)
            if not answer.allowed:
                return refusal(request, answer)
        try:
            response = cast("HttpResponseBase", self.get_response(request))
        except BaseException as error:
            finishing.fail(request, error)
            raise
        finishing.finish(request, response)
        return _with_headers(response, request)

    async def _answer(self, request: HttpRequest) -> HttpResponseBase:
        try:
            limited = limits_of(request)
        except CostOutOfBounds as error:
            return out_of_bounds(error)
        if limited is not None:
            identity = await aidentify(request)
            if limited.key is not None:
                identity = await awith_view_keys(identity, limited.key, limited.asked(request))
            try:
                answer = await acheck_and_wait(identity, limited.scope, request.method or "", limited.costs)
            except WrongCost as error:
                raise wrong_cost(error, limited.view) from None
            finishing.begin(request, answer)
            if not answer.allowed:
                return await arefusal(request, answer)
        try:
            response = await cast("Awaitable[HttpResponseBase]", self.get_response(request))
        except BaseException as error:
            await finishing.afail(request, error)
            raise
        await finishing.afinish(request, response)
        return _with_headers(response, request)
