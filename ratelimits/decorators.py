"""The decorator that limits plain Django views, sync or async."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ratelimits.identity import aidentify, identify
from ratelimits.quota import finishing
from ratelimits.quota.answers.responses import Cost, arefusal, costs_of, refusal, scope_of, with_headers, wrong_cost
from ratelimits.quota.costs import WrongCost
from ratelimits.quota.waiting import acheck_and_wait, check_and_wait
from ratelimits.view_keys import Key, check_key, with_view_key

View = TypeVar("View", bound=Callable[..., Any])


def _is_async(view: Any) -> bool:
    """Return whether a view must be awaited: an async function, or `dispatch` of a view class with async handlers."""
    # `dispatch` itself is not async, but returns the handler's coroutine. `method_decorator` wraps it in a `partial`.
    method = getattr(view, "func", view)
    return iscoroutinefunction(view) or getattr(getattr(method, "__self__", None), "view_is_async", False) is True


def limited(
    scope: str = "*",
    cost: Cost | Callable[[HttpRequest], Cost] | None = None,
    key: Key | None = None,
) -> Callable[[View], View]:
    """Limit a view by the rules of `scope`.

    `cost` is a number of requests, a mapping of meters to costs, or a callable that takes the request and returns one
    of these. `key` is the key for rules that count per "key that the view gives": "header:X-Tenant", "query:team",
    "field:email", "arg:pk", or a callable that takes the request. The answer is set as `request.quota`. Use
    ratelimits.quota.receipts to settle or refund the request.
    """

    def decorate(view: View) -> View:
        scope_name = scope_of(scope, view)
        check_key(key)

        @functools.wraps(view)
        def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            costs = costs_of(cost, request)
            identity = with_view_key(identify(request), key, request, kwargs, request)
            try:
                answer = check_and_wait(identity, scope_name, request.method or "", costs, request)
            except WrongCost as error:
                raise wrong_cost(error, view) from None
            finishing.begin(request, answer)
            if not answer.allowed:
                return refusal(request, answer)
            try:
                response = view(request, *args, **kwargs)
            except Exception:
                # Django turns the error into a response, and the middleware refunds a server error.
                finishing.end(request)
                raise
            except BaseException as error:
                finishing.fail(request, error)
                raise
            finishing.leave(request, response)
            return with_headers(response, answer)

        @functools.wraps(view)
        async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            costs = costs_of(cost, request)
            identity = with_view_key(await aidentify(request), key, request, kwargs, request)
            try:
                answer = await acheck_and_wait(identity, scope_name, request.method or "", costs)
            except WrongCost as error:
                raise wrong_cost(error, view) from None
            finishing.begin(request, answer)
            if not answer.allowed:
                return await arefusal(request, answer)
            try:
                response = await view(request, *args, **kwargs)
            except Exception:
                await finishing.aend(request)
                raise
            except BaseException as error:
                await finishing.afail(request, error)
                raise
            await finishing.aleave(request, response)
            return with_headers(response, answer)

        wrapped: Any = async_view if _is_async(view) else sync_view
        wrapped.ratelimits = scope_name, cost  # For the middleware and the admin: this view is limited.
        return cast("View", wrapped)

    return decorate
