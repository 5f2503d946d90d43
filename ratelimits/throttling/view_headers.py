"""Add header fields to the response of a view of Django REST framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratelimits.answers.headers import NEVER, kept_for_caller

#: For a refusal without other fields.
REFUSED = {"Cache-Control": NEVER}


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
