"""The decorator that limits operations of django-ninja, sync or async.

Write it below the operation's own decorator, so that the operation's authentication and validation come first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from ratelimits import unknown_names
from ratelimits.answers.answer import Answer
from ratelimits.answers.responses import arefusal, refusal, with_headers
from ratelimits.decorators import AnyCost, adecided, aended_if_it_fails, decided, ended_if_it_fails
from ratelimits.quota.costs import Bounds, CostOutOfBounds, check_bounds, out_of_bounds, scope_of, view_name
from ratelimits.view_keys import Key, check_key

Operation = TypeVar("Operation", bound=Callable[..., Any])
#: The name of the argument by which django-ninja passes the response whose headers an operation can set.
_RESPONSE = "ratelimits_response"


def limited(
    scope: str = "*",
    cost: AnyCost = None,
    key: Key | None = None,
    cost_bounds: Bounds | None = None,
) -> Callable[[Operation], Operation]:
    """Limit an operation by the rules of `scope`.

    The arguments mean the same as for `ratelimits.decorators.limited`. The API key is the result of the operation's
    authentication. A request whose authentication or validation fails is not charged. A refused request gets the same
    response as from a plain Django view. The answer is set as `request.quota`.
    """

    unknown_names.note_decorator(scope, cost, key)

    def decorate(operation: Operation) -> Operation:
        scope_name = scope_of(scope, operation)
        check_key(key)
        check_bounds(cost_bounds, f"{view_name(operation)}, the argument `cost_bounds` of `limited`")
        signature, response_name = _with_response(operation)
        _check_fields(operation, signature, key, cost)

        @functools.wraps(operation)
        def sync_operation(request: HttpRequest, **values: Any) -> Any:
            try:
                answer = decided(operation, request, values, scope_name, cost, key, cost_bounds)
            except CostOutOfBounds as error:
                return out_of_bounds(error)
            _write_headers(answer, values, response_name)
            if not answer.allowed:
                return refusal(request, answer)
            with ended_if_it_fails(request):
                return _with_headers(operation(request, **values), answer)

        @functools.wraps(operation)
        async def async_operation(request: HttpRequest, **values: Any) -> Any:
            try:
                answer = await adecided(operation, request, values, scope_name, cost, key, cost_bounds)
            except CostOutOfBounds as error:
                return out_of_bounds(error)
            _write_headers(answer, values, response_name)
            if not answer.allowed:
                return await arefusal(request, answer)
            async with aended_if_it_fails(request):
                return _with_headers(await operation(request, **values), answer)

        wrapped: Any = async_operation if iscoroutinefunction(operation) else sync_operation
        wrapped.__signature__ = signature
        wrapped.ratelimits = scope_name, cost, key  # tells the admin that this operation is limited
        return cast("Operation", wrapped)

    return decorate


def _with_response(operation: Callable[..., Any]) -> tuple[inspect.Signature, str]:
    """Return the operation's signature with an argument for the response, and the argument's name.

    The argument's annotation is HttpResponse. So django-ninja passes a response whose headers the operation can set.
    """
    # Evaluate annotations that are texts. Otherwise django-ninja would look in this module for the names in such texts.
    signature = inspect.signature(operation, eval_str=True)
    for name, parameter in signature.parameters.items():
        if parameter.annotation is HttpResponse:
            return signature, name
    response = inspect.Parameter(_RESPONSE, inspect.Parameter.KEYWORD_ONLY, annotation=HttpResponse)
    # Python allows no argument after **kwargs.
    parameters = sorted([*signature.parameters.values(), response], key=lambda parameter: parameter.kind)
    return signature.replace(parameters=parameters), _RESPONSE


def _check_fields(operation: object, signature: inspect.Signature, key: Key | None, cost: AnyCost) -> None:
    """Raise ImproperlyConfigured if a key or a cost is a field of a form, but the operation reads no form.

    django-ninja reads any other body as JSON, whatever its content type is. So a client could send one text that is a
    form for this app and JSON for the operation, with two values of the field.
    """
    keys = key if isinstance(key, (list, tuple)) else [key]
    costs = cost.values() if isinstance(cost, Mapping) else [cost]
    fields = [one for one in (*keys, *costs) if isinstance(one, str) and one.strip().startswith("field:")]
    marks = [
        mark
        for parameter in signature.parameters.values()
        for mark in (parameter.default, *getattr(parameter.annotation, "__metadata__", ()))
    ]
    if fields and not any(type(mark).__name__ == "Form" for mark in marks):
        raise ImproperlyConfigured(
            f"{view_name(operation)}: {fields[0]!r} is a field of a form, but this operation has no argument with Form"
            " of django-ninja, so it reads its body as JSON. Write a function of the request instead, such as"
            " `lambda request: json.loads(request.body)['email']`."
        )


def _write_headers(answer: Answer, values: dict[str, Any], response_name: str) -> None:
    """Add the RateLimit fields to the response whose headers an operation can set.

    `values` are the arguments. If the operation itself takes no response, remove the response from `values`. With
    `add_decorator`, django-ninja passes no response, since it has read the signature before. Then the middleware adds
    the fields.
    """
    response = values.pop(response_name, None) if response_name == _RESPONSE else values[response_name]
    if response is not None:
        with_headers(response, answer)


def _with_headers(result: Any, answer: Answer) -> Any:
    """Add the RateLimit fields to a result that is a response. django-ninja makes a response of any other result."""
    return with_headers(result, answer) if isinstance(result, HttpResponseBase) else result
