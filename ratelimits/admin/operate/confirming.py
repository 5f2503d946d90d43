"""The page that shows the consequences of an action before the user confirms it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

#: The permission to block, allow, reset and grant.
OPERATE = "ratelimits.operate"
#: Name of the hidden input that says that the user has confirmed the page.
CONFIRMED = "_confirmed"


class Consequences(NamedTuple):
    """The consequences of an action: sentences, warnings, and a table with its column heads."""

    title: str
    sentences: Sequence[Any]
    warnings: Sequence[Any] = ()
    heads: Sequence[Any] = ()
    rows: Sequence[Sequence[Any]] = ()


def may_operate(request: HttpRequest) -> bool:
    """Return whether the user may block, allow, reset and grant."""
    return request.user.has_perm(OPERATE)


def is_confirmed(request: HttpRequest) -> bool:
    """Return whether the page was seen and confirmed."""
    return bool(request.POST.get(CONFIRMED))


def confirmation(
    request: HttpRequest, site: AdminSite, opts: Any, consequences: Consequences, back: str, *, form: Any = None
) -> HttpResponse:
    """Return the page. Its form posts the typed values again.

    `form` has further inputs. `back` is the URL of the link that cancels.
    """
    asked = {CONFIRMED, "csrfmiddlewaretoken", *(form.fields if form is not None else ())}
    typed = [(name, value) for name, values in request.POST.lists() if name not in asked for value in values]
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
