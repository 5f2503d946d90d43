"""Write the responses to refused requests, and add the RateLimit fields to others. All entry points do it with these.

The entry points are the throttle classes, the middleware and the decorators.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.template.response import SimpleTemplateResponse

from ratelimits.answers import headers
from ratelimits.answers.answer import Answer
from ratelimits.answers.headers import kept_for_caller, never_stored
from ratelimits.conf import conf, shown


def problem_document(body: Mapping[str, Any], status: int, fields: Mapping[str, str]) -> HttpResponse:
    """Return a response with a problem document of RFC 9457 and these header fields."""
    return JsonResponse(body, status=status, headers=dict(fields), content_type="application/problem+json")


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
    return problem_document(body, status, answer.headers())


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
