"""Read a view's cost and scope, and write its responses. All entry points use these functions.

The entry points are the throttle class, the middleware and the decorators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.template.response import SimpleTemplateResponse
from django.utils.functional import Promise

from ratelimits.conf import conf, shown
from ratelimits.quota import headers
from ratelimits.quota.answers.answer import ONE_REQUEST, Answer
from ratelimits.quota.answers.caching import NEVER, kept_for_caller, never_stored
from ratelimits.quota.answers.client_costs import Bounds, CostOutOfBounds, at_places, check_bounds, within
from ratelimits.quota.costs import WrongCost

Cost = int | str | Mapping[str, int | str]
_PROBLEM = "application/problem+json"


def costs_of(
    cost: Cost | Callable[..., Cost] | None,
    *about: Any,
    bounds: Bounds | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Mapping[str, int]:
    """Return a view's costs by meter.

    None means one request. A number is the cost in the meter "requests". A callable is called with the arguments
    `about`, of which the first is the request, and returns None, a number or a mapping. In the meters of `bounds`, the
    client chooses the cost. `arguments` are the arguments in the URL. Raise CostOutOfBounds if the client's cost is not
    valid.
    """
    value = cost(*about) if callable(cost) else cost
    if value is None:
        return ONE_REQUEST
    costs: Mapping[str, Any] = value if isinstance(value, Mapping) else {"requests": value}
    if bounds is None:
        return costs
    check_bounds(bounds, "throttle_cost_bounds")
    if not callable(cost):  # the text that a function returns is the client's, and no place
        costs = at_places(costs, bounds, about[0], arguments or {})
    return within(costs, bounds)


def out_of_bounds(error: CostOutOfBounds) -> HttpResponse:
    """Return the response to a request whose client has chosen a cost beyond the bounds of the view."""
    body = {"title": "Bad Request", "status": 400, "detail": str(error)}
    return JsonResponse(body, status=400, headers={"Cache-Control": NEVER}, content_type=_PROBLEM)


def wrong_cost(error: WrongCost, view: object) -> WrongCost:
    """Return the same error with the view's name in its message."""
    return WrongCost(f"{view_name(view)}: {error}")


def scope_of(scope: object, view: object) -> str:
    """Return a view's scope as a str. Raise ImproperlyConfigured if `scope` is neither a str nor a lazy text."""
    if isinstance(scope, str):
        return scope
    if isinstance(scope, Promise):
        return str(scope)
    raise ImproperlyConfigured(f"{view_name(view)}: the scope must be a text such as 'search', not {shown(scope)}")


def view_name(view: Any) -> str:
    """Return the name of a view for messages, such as "shop.views.search"."""
    function = view if hasattr(view, "__qualname__") else type(view)
    return f"{function.__module__}.{function.__qualname__}"


def refusal(request: HttpRequest, answer: Answer) -> HttpResponseBase:
    """Return the response to a refused request, with the RateLimit fields.

    The function RATELIMITS["REFUSAL_RESPONSE"] makes the response. If this function is not set or returns None, the
    response is a problem document of RFC 9457.
    """
    response = own_refusal(request, answer)
    return _problem(answer) if response is None else with_headers(response, answer)


async def arefusal(request: HttpRequest, answer: Answer) -> HttpResponseBase:
    """Do the same as `refusal`, in async code. RATELIMITS["REFUSAL_RESPONSE"] runs in a thread."""
    if conf.REFUSAL_RESPONSE is None:
        return _problem(answer)
    return await sync_to_async(refusal)(request, answer)


def own_refusal(request: HttpRequest, answer: Answer) -> HttpResponseBase | None:
    """Return the project's own response to a refused request; None if the project has no response of its own.

    Raise ImproperlyConfigured if RATELIMITS["REFUSAL_RESPONSE"] returns anything else.
    """
    make = conf.REFUSAL_RESPONSE
    response = None if make is None else make(request, answer)
    if response is None or isinstance(response, HttpResponseBase):
        return response
    raise ImproperlyConfigured(
        f"RATELIMITS['REFUSAL_RESPONSE'] must return a response of Django or None, not {shown(response)}"
    )


def _problem(answer: Answer) -> HttpResponse:
    if answer.unavailable:
        body, status = headers.unavailable(), 503
    elif answer.access is not None:
        status = answer.access.status
        body = headers.blocked(status, answer.access.message)
    else:
        rule = answer.binding
        status, text = (rule.refusal_status, rule.refusal_text) if rule is not None else (429, "")
        body = headers.problem([rule.name] if rule is not None else [], answer.retry_after, status, text)
    return JsonResponse(body, status=status, headers=answer.headers(), content_type=_PROBLEM)


def with_headers(response: HttpResponseBase, answer: Answer) -> HttpResponseBase:
    """Add the RateLimit fields that a response does not have yet, and keep it out of shared caches. Return it.

    If the response is not rendered yet, add the fields later: a cache behind the entry point stores it without them.
    """
    if answer.allowed and getattr(response, "is_rendered", True) is False:
        cast("SimpleTemplateResponse", response).add_post_render_callback(partial(_add_headers, answer=answer))
    else:
        _add_headers(response, answer)
    return response


def _add_headers(response: HttpResponseBase, answer: Answer) -> None:
    # Another entry point has perhaps added the fields already.
    if not (answer.allowed and "RateLimit" in response.headers):
        for field, value in answer.headers().items():
            response.headers.setdefault(field, value)
    if answer.allowed:
        kept_for_caller(response)
    else:
        never_stored(response)
