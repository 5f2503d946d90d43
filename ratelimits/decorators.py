"""The decorator that limits views, sync or async, of Django or of Django REST framework."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ratelimits import unknown_names
from ratelimits.answers.answer import Answer
from ratelimits.answers.responses import arefusal, refusal, with_headers
from ratelimits.conf import shown
from ratelimits.identity import aidentify, identify
from ratelimits.quota import finishing
from ratelimits.quota.costs import (
    Bounds,
    Cost,
    CostOutOfBounds,
    WrongCost,
    check_bounds,
    costs_of,
    out_of_bounds,
    scope_of,
    view_name,
    wrong_cost,
)
from ratelimits.quota.waiting import acheck_and_wait, check_and_wait
from ratelimits.view_keys import AskedView, Key, awith_view_keys, check_key, with_view_keys

View = TypeVar("View", bound=Callable[..., Any])
#: A cost, or a callable that takes the request and returns a cost. None means one request.
AnyCost = Cost | Callable[[HttpRequest], Cost] | None
#: Where a view's key is written, for messages.
_PLACE = "the argument `key` of `limited`"


def _is_async(view: Any) -> bool:
    """Return whether a view must be awaited: an async function, or `dispatch` of a view class with async handlers."""
    # `dispatch` itself is not async, but returns the handler's coroutine. `method_decorator` wraps it in a `partial`.
    method = getattr(view, "func", view)
    return iscoroutinefunction(view) or getattr(getattr(method, "__self__", None), "view_is_async", False) is True


def limited(
    scope: str = "*",
    cost: AnyCost = None,
    key: Key | None = None,
    cost_bounds: Bounds | None = None,
) -> Callable[[View], View]:
    """Limit a view by the rules of `scope`.

    `cost` is a number of permits of the meter "requests", a mapping of meters to costs, or a callable that takes the
    request and returns one of these. `key` is the key for rules that count per "key that the view gives":
    "header:X-Tenant", "query:team", "field:email", "arg:pk", a callable that takes the request, or a list of these. The
    answer is set as `request.quota`. Use ratelimits.quota.receipts to settle or refund the request.

    If clients choose the cost in some meters, `cost_bounds` has the lowest and the highest cost in each of these
    meters, such as {"tokens": (1, 8_000)}. Then a cost can also be the place of a number in the request:
    {"tokens": "field:max_tokens"}. A request with another cost gets 400.
    """

    unknown_names.note_decorator(scope, cost, key)

    def decorate(view: View) -> View:
        scope_name = scope_of(scope, view)
        check_key(key)
        check_bounds(cost_bounds, f"{view_name(view)}, the argument `cost_bounds` of `limited`")

        @functools.wraps(view)
        def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            plain = django_request(request, view)
            try:
                answer = decided(view, request, kwargs, scope_name, cost, key, cost_bounds)
            except CostOutOfBounds as error:
                return out_of_bounds(error)
            if not answer.allowed:
                return refusal(plain, answer)
            with ended_if_it_fails(plain):
                response = view(request, *args, **kwargs)
            finishing.leave(plain, response)
            return with_headers(response, answer)

        @functools.wraps(view)
        async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            plain = django_request(request, view)
            try:
                answer = await adecided(view, request, kwargs, scope_name, cost, key, cost_bounds)
            except CostOutOfBounds as error:
                return out_of_bounds(error)
            if not answer.allowed:
                return await arefusal(plain, answer)
            async with aended_if_it_fails(plain):
                response = await view(request, *args, **kwargs)
            await finishing.aleave(plain, response)
            return with_headers(response, answer)

        wrapped: Any = async_view if _is_async(view) else sync_view
        wrapped.ratelimits = scope_name, cost, key  # tells the middleware and the admin that this view is limited
        return cast("View", wrapped)

    return decorate


def django_request(request: Any, view: object) -> HttpRequest:
    """Return Django's request, which a request of Django REST framework contains.

    The middleware and the web server end Django's request, so only Django's request can say what must end. Raise
    ImproperlyConfigured if a view gets anything else.
    """
    plain = getattr(request, "_request", request)
    if isinstance(plain, HttpRequest):
        return plain
    raise ImproperlyConfigured(
        f"{view_name(view)}: limited got {shown(request)} instead of a request. If this is the method of a class, write"
        " @method_decorator(limited(…))."
    )


def decided(
    view: object,
    request: Any,
    arguments: Mapping[str, Any],
    scope: str,
    cost: AnyCost,
    key: Key | None,
    bounds: Bounds | None,
) -> Answer:
    """Decide a request to a view, and wait if its rules say so. Set the answer as `request.quota`, and return it.

    `request` is a request of Django or of Django REST framework. `arguments` are the arguments that the view gets from
    the URL. Raise WrongCost, with the view's name, if the view's cost is not valid, and CostOutOfBounds if its client
    has chosen a cost that is not valid.
    """
    plain = django_request(request, view)
    costs = costs_of(cost, request, bounds=bounds, arguments=arguments)
    identity = identify(request)
    if key is not None:
        identity = with_view_keys(identity, key, AskedView(request, arguments, (request,), view, _PLACE))
    try:
        answer = check_and_wait(identity, scope, plain.method or "", costs, plain)
    except WrongCost as error:
        raise wrong_cost(error, view) from None
    finishing.begin(plain, answer)
    return answer


async def adecided(
    view: object,
    request: Any,
    arguments: Mapping[str, Any],
    scope: str,
    cost: AnyCost,
    key: Key | None,
    bounds: Bounds | None,
) -> Answer:
    """Do the same as `decided`, in async code."""
    plain = django_request(request, view)
    costs = costs_of(cost, request, bounds=bounds, arguments=arguments)
    identity = await aidentify(request)
    if key is not None:
        identity = await awith_view_keys(identity, key, AskedView(request, arguments, (request,), view, _PLACE))
    try:
        answer = await acheck_and_wait(identity, scope, plain.method or "", costs)
    except WrongCost as error:
        raise wrong_cost(error, view) from None
    finishing.begin(plain, answer)
    return answer


@contextmanager
def ended_if_it_fails(request: HttpRequest) -> Iterator[None]:
    """End the request if its view, which is called in this block, raises an exception."""
    try:
        yield
    except Exception:
        # The request still gets a response: the framework makes it from the error. If the response has the status of a
        # server error, the middleware refunds the request.
        finishing.end(request)
        raise
    except BaseException as error:
        finishing.fail(request, error)
        raise


@asynccontextmanager
async def aended_if_it_fails(request: HttpRequest) -> AsyncIterator[None]:
    """Do the same as `ended_if_it_fails`, in async code."""
    try:
        yield
    except Exception:
        await finishing.aend(request)
        raise
    except BaseException as error:
        await finishing.afail(request, error)
        raise
