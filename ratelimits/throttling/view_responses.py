"""Write to the responses of a view of Django REST framework: errors that refuse, and header fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.http.response import HttpResponseBase
from django.utils.translation import gettext_lazy as _
from rest_framework.exceptions import APIException, ErrorDetail, Throttled

from ratelimits.answers.answer import Answer, AnswerAccess
from ratelimits.answers.headers import NEVER, kept_for_caller
from ratelimits.answers.responses import own_refusal, with_headers

#: For a refusal without other fields.
REFUSED = {"Cache-Control": NEVER}


class QuotaUnavailable(APIException):
    """Raised if no decision could be made, and a failure policy refuses the request."""

    status_code = 503
    default_detail = _("The quota of this request cannot be checked now.")
    default_code = "quota_unavailable"


class QuotaBlocked(APIException):
    """Raised if a block refuses the request. It has the block's status, and the block's message for the client."""

    default_code = "blocked"

    def __init__(self, row: AnswerAccess) -> None:
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


def add_fields(request: Any, view: Any, fields: Mapping[str, str]) -> None:
    """Add header fields to the response that a view will make, and keep the response out of shared caches.

    `request` is the request of Django REST framework.
    """
    headers = getattr(view, "headers", None)
    if headers is None:
        return
    headers.update(fields)
    if fields.get("Cache-Control") == NEVER:
        return  # a refusal
    # The view object serves only this request, so change it. Do not refer to the view: that would be a circle, which
    # only the garbage collector ends.
    is_own = getattr(request, "parser_context", {}).get("view") is view
    if is_own:
        view.finalize_response = _finalize


def _finalize(request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
    view: Any = request.parser_context["view"]
    return kept_for_caller(type(view).finalize_response(view, request, response, *args, **kwargs))
