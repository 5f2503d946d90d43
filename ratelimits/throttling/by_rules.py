"""The throttle class for Django REST framework. It decides by all rules, so make it the only throttle of a view.

DRF runs every throttle of a view, even after one has refused. So a request that another throttle refuses would still be
charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.http.response import HttpResponseBase
from django.utils.translation import gettext_lazy as _
from rest_framework.exceptions import APIException, ErrorDetail, Throttled
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from ratelimits.conf import conf
from ratelimits.identity import identify
from ratelimits.quota import finishing
from ratelimits.quota.answers.answer import ONE_REQUEST, Answer
from ratelimits.quota.answers.client_costs import CostOutOfBounds
from ratelimits.quota.answers.responses import costs_of, own_refusal, scope_of, with_headers, wrong_cost
from ratelimits.quota.costs import WrongCost
from ratelimits.quota.waiting import check_and_wait
from ratelimits.rules import AccessRow
from ratelimits.throttling.view_headers import REFUSED, add_fields
from ratelimits.view_keys import AskedView, Key, with_view_keys

if TYPE_CHECKING:
    from rest_framework.views import APIView  # Not at runtime: `views` imports the throttle classes itself.


class QuotaUnavailable(APIException):
    """Raised if no decision could be made, and a failure policy refuses the request."""

    status_code = 503
    default_detail = _("The quota of this request cannot be checked now.")
    default_code = "quota_unavailable"


class QuotaBlocked(APIException):
    """Raised if a block refuses the request. It has the block's status, and the block's message for the client."""

    default_code = "blocked"

    def __init__(self, row: AccessRow) -> None:
        self.status_code = row.status
        super().__init__(row.message or _("You are blocked."))


class QuotaRefused(Throttled):
    """Raised if a rule with its own status or text refuses the request, or if the project has a REFUSAL_RESPONSE."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.retry_after)
        rule = answer.binding
        if rule is not None:
            self.status_code = rule.refusal_status
            if rule.refusal_text:
                self.detail = ErrorDetail(rule.refusal_text, self.default_code)


class CostRefused(APIException):
    """Raised if the client has chosen a cost beyond the view's `throttle_cost_bounds`."""

    status_code = 400
    default_code = "cost"


class QuotaThrottle(BaseThrottle):
    """The throttle class: it decides requests by the rules in the admin.

    A view can have a `throttle_scope` and a `throttle_cost`. Rules can name the scope (the default is "*"). The cost is
    a whole number of permits of the meter "requests", or a mapping of meters to such numbers, for example
    {"requests": 1, "tokens": 250}, or a callable that takes (request, view) and returns one of these. `request.quota`
    is the answer. With the receipt in the answer's decision, the request can be refunded or settled.

    If clients choose the cost in some meters, `throttle_cost_bounds` has the lowest and the highest cost in each of
    these meters, such as {"tokens": (1, 8_000)}. Then a cost can also be the place of a number in the request:
    {"requests": 1, "tokens": "field:max_tokens"}. A request with another cost gets 400.

    A view, or a subclass of this class, can have a `throttle_key` for rules that count per "key that the view gives":
    "header:X-Tenant", "query:team", "field:email", "arg:pk", a callable that takes (request, view), or a list of these.
    """

    throttle_key: Key | None = None
    _answer: Answer | None = None

    def allow_request(self, request: Request, view: APIView) -> bool:
        """Return whether the request may proceed, and charge it. Add the RateLimit fields to the view's headers.

        Raise QuotaUnavailable if a failure policy refuses the request, QuotaBlocked if a block refuses it, QuotaRefused
        if a rule with its own status or text refuses it, CostRefused if the client's cost is not within its bounds, and
        WrongCost if the view's cost is not valid. If the project has its own response to refused requests
        (REFUSAL_RESPONSE), each refusal raises one of the first three errors, and the view answers the error with this
        response.
        """
        # Use Django's request: the middleware reads the answer from it, and DRF's request is slower.
        django_request: Any = getattr(request, "_request", request)
        cost = getattr(view, "throttle_cost", None)
        costs = ONE_REQUEST if cost is None else _costs(cost, request, view)
        scope = getattr(view, "throttle_scope", None) or "*"
        if not isinstance(scope, str):
            scope = scope_of(scope, view)
        identity = identify(request)
        key = getattr(view, "throttle_key", None) or self.throttle_key
        if key is not None:
            # DRF's request reads every kind of body, Django's request only forms.
            asked = AskedView(request, getattr(view, "kwargs", {}), (request, view), view, "throttle_key")
            identity = with_view_keys(identity, key, asked)
        try:
            answer = check_and_wait(identity, scope, django_request.method or "", costs, django_request)
        except WrongCost as error:
            raise wrong_cost(error, view) from None
        self._answer = answer
        finishing.begin(django_request, answer)
        add_fields(request, view, answer.headers())
        # In these cases Django REST framework's own refusal (with the status 429) can be wrong.
        if not answer.allowed and (
            answer.decision is None
            or answer.prepared is None
            or answer.prepared.has_own_refusals
            or conf.REFUSAL_RESPONSE is not None
        ):
            raise_refusal(django_request, answer, view)
        # After a refusal, Django REST framework makes the response, and calls the view's `throttled`.
        return answer.allowed

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted. Return None if it can never be admitted."""
        return self._answer.retry_after if self._answer is not None else None


def _costs(cost: Any, request: Request, view: APIView) -> Mapping[str, int]:
    """Return the costs of a view by meter. Raise CostRefused if the client's cost is not valid."""
    # A method of the view has the view as `self`.
    about = (request,) if callable(cost) and getattr(cost, "__self__", None) is view else (request, view)
    bounds, arguments = getattr(view, "throttle_cost_bounds", None), getattr(view, "kwargs", None)
    try:
        return costs_of(cost, *about, bounds=bounds, arguments=arguments)
    except CostOutOfBounds as error:
        add_fields(request, view, REFUSED)
        raise CostRefused(str(error)) from None


def raise_refusal(request: Any, answer: Answer, view: Any) -> None:
    """Raise the error for a refused request. Do nothing if Django REST framework's own refusal is right."""
    response = own_refusal(request, answer)
    refused = _error(answer, always=response is not None)
    if refused is None:
        return
    if response is not None:
        _answer_with(with_headers(response, answer), refused, view)
    raise refused


def _error(answer: Answer, *, always: bool) -> APIException | None:
    """Return the error for a refused request.

    If the rule that refuses has no status and no text of its own, return None, except if `always` is true.
    """
    if answer.unavailable:
        return QuotaUnavailable()
    if answer.access is not None:
        return QuotaBlocked(answer.access)
    rule = answer.binding
    if always or (rule is not None and (rule.refusal_text or rule.refusal_status != Throttled.status_code)):
        return QuotaRefused(answer)
    return None


def _answer_with(response: HttpResponseBase, error: APIException, view: Any) -> None:
    """Let a view answer this error with this response. The view object serves only this request, so change it."""
    if not hasattr(view, "get_exception_handler"):
        return
    usual_handler = view.get_exception_handler()

    def handler(exc: Exception, context: Any) -> Any:
        return response if exc is error else usual_handler(exc, context)

    view.get_exception_handler = lambda: handler
