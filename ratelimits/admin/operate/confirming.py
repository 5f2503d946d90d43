"""The page that shows the consequences of an action before the user confirms it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

#: The permission to block, allow and reset keys, and to give keys more permits.
OPERATE = "ratelimits.operate"
#: Name of the hidden input of the page. If a POST has this input, the user has confirmed the consequences.
CONFIRMED = "_confirmed"


class Consequences(NamedTuple):
    """The consequences of an action, as a page shows them.

    heads  the column heads of a table; empty if there is no table
    rows   the rows of the table
    """

    title: str
    sentences: Sequence[Any]
    warnings: Sequence[Any] = ()
    heads: Sequence[Any] = ()
    rows: Sequence[Sequence[Any]] = ()


def may_operate(request: HttpRequest) -> bool:
    """Return whether the user may block, allow and reset keys, and give keys more permits."""
    return request.user.has_perm(OPERATE)


def is_confirmed(request: HttpRequest) -> bool:
    """Return whether the user has confirmed the consequences."""
    return bool(request.POST.get(CONFIRMED))


def confirmation(
    request: HttpRequest, site: AdminSite, opts: Any, consequences: Consequences, back: str, *, form: Any = None
) -> HttpResponse:
    """Return the page with the consequences. When the user confirms, the page posts the values of this POST again.

    `back` is the URL of the link that cancels the action. `form` is a form with further inputs on this page.
    """
    excluded = {CONFIRMED, "csrfmiddlewaretoken", *(form.fields if form is not None else ())}
    typed = [(name, value) for name, values in request.POST.lists() if name not in excluded for value in values]
    context = {
        **site.each_context(request),
        "title": consequences.title,
        "consequences": consequences,
        "opts": opts,
        "typed": typed,
        "confirmed": CONFIRMED,
        "back": back,
        "form": form,
    }
    return TemplateResponse(request, "ratelimits/admin/operate_confirm.html", context)
