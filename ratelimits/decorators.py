"""The face for plain Django views: a decorator, for sync and async views alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase

from ratelimits import headers
from ratelimits.identity import aidentify, identify
from ratelimits.quota import ONE_REQUEST, Answer
from ratelimits.waiting import acheck_and_wait, check_and_wait

Cost = int | Mapping[str, int]
View = TypeVar("View", bound=Callable[..., Any])


def costs_of(cost: Cost | Callable[..., Cost] | None, *about: Any) -> Mapping[str, int]:
    """A view's cost by meter: None is one request, a number so many, a callable is asked, a mapping says it all."""
    if callable(cost):
        cost = cost(*about)
    if cost is None:
        return ONE_REQUEST
    return cost if isinstance(cost, Mapping) else {"requests": cost}


def refusal(answer: Answer) -> HttpResponse:
    """The response to a refused request: a problem document (RFC 9457) with the RateLimit fields."""
    if answer.unavailable:
        body, status = headers.unavailable(), 503
    else:
        rule = answer.binding
        body, status = headers.problem([rule.name] if rule is not None else [], answer.retry_after), 429
    return JsonResponse(body, status=status, headers=answer.headers(), content_type="application/problem+json")


def told(response: HttpResponseBase, answer: Answer) -> HttpResponseBase:
    """The response with the RateLimit fields on it."""
    for field, value in answer.headers().items():
        response.headers.setdefault(field, value)
    return response


def limited(scope: str = "*", cost: Cost | Callable[[HttpRequest], Cost] | None = None) -> Callable[[View], View]:
    """Govern a view by the rules of `scope`; `cost` is that of DRF's `throttle_cost`, a callable gets the request.

    The answer is kept as `request.quota`; ratelimits.receipts settles or refunds it.
    """

    def decorate(view: View) -> View:
        @functools.wraps(view)
        def sync_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            answer = check_and_wait(identify(request), scope, request.method or "", costs_of(cost, request))
            request.quota = answer  # type: ignore[attr-defined]
            if not answer.allowed:
                return refusal(answer)
            return told(view(request, *args, **kwargs), answer)

        @functools.wraps(view)
        async def async_view(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            who = await aidentify(request)
            answer = await acheck_and_wait(who, scope, request.method or "", costs_of(cost, request))
            request.quota = answer  # type: ignore[attr-defined]
            if not answer.allowed:
                return refusal(answer)
            return told(await view(request, *args, **kwargs), answer)

        wrapped: Any = async_view if iscoroutinefunction(view) else sync_view
        wrapped.ratelimits = True
        return cast("View", wrapped)

    return decorate
