"""The throttle class for Django REST framework. It decides by all rules, so make it the only throttle of a view.

DRF runs every throttle of a view, even after one has refused. So a request that another throttle refuses would still be
charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.identity import identify
from ratelimits.quota import finishing
from ratelimits.quota.costs import ONE_REQUEST, CostOutOfBounds, WrongCost, costs_of, scope_of, wrong_cost
from ratelimits.quota.waiting import check_and_wait
from ratelimits.throttling.view_responses import REFUSED, add_fields, raise_refusal
from ratelimits.view_keys import AskedView, Key, with_view_keys

if TYPE_CHECKING:
    from rest_framework.views import APIView  # Not at runtime: `views` imports the throttle classes itself.


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
