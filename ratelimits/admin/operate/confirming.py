"""The page that shows the consequences of an action, or of an edit, before the user confirms it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from django.contrib.admin import AdminSite
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ratelimits.models.versions import editing

if TYPE_CHECKING:
    from ratelimits.admin.audited import AuditedAdmin as _Base
else:
    _Base = object

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
    request: HttpRequest,
    site: AdminSite,
    opts: Any,
    consequences: Consequences,
    back: str,
    *,
    form: Any = None,
    bills: Consequences | None = None,
) -> HttpResponse:
    """Return the page with the consequences. When the user confirms, the page posts the values of this POST again.

    `back` is the URL of the link that cancels the action. `form` is a form with further inputs on this page. `bills` is
    what `changed_bills` returns.
    """
    excluded = {CONFIRMED, "csrfmiddlewaretoken", *(form.fields if form is not None else ())}
    typed = [(name, value) for name, values in request.POST.lists() if name not in excluded for value in values]
    context = {
        **site.each_context(request),
        "title": consequences.title,
        "consequences": consequences,
        "bills": bills,
        "opts": opts,
        "typed": typed,
        "confirmed": CONFIRMED,
        "back": back,
        "form": form,
    }
    return TemplateResponse(request, "ratelimits/admin/operate_confirm.html", context)


def changed_bills(
    using: str, accounts: Callable[[], Collection[str]], save: Callable[[], object]
) -> Consequences | None:
    """Return which bills an edit would change, as `AsksBeforeSaving` says it before a save; None if none.

    `accounts` returns the accounts whose bills are compared, and `save` makes the edit, which is rolled back.
    """
    compared = AsksBeforeSaving.compare_bills and AsksBeforeSaving.compare_bills(accounts())
    if compared is None:
        return None
    with editing(using):
        save()
        changed = compared(accounts())
        transaction.set_rollback(True, using=using)
    return changed


class AsksBeforeSaving(_Base):
    """Mixin for the admin pages of plans and accounts. Put it before `AuditedAdmin`.

    Before the first save about which there are doubts, a page lists them. The edit itself is rolled back meanwhile.
    """

    #: Takes accounts before an edit, and returns a function that takes those after it and says which bills the edit
    #: changes; None while no edit can change a bill of a past month. The floor of bills sets it.
    compare_bills: ClassVar[
        Callable[[Collection[str]], Callable[[Collection[str]], Consequences | None] | None] | None
    ] = None

    def billed_accounts(self, row: Any) -> Collection[str]:
        """Return the accounts whose bills depend on the row, which is perhaps not saved yet."""
        raise NotImplementedError

    def doubts(self, request: HttpRequest, row: Any, *, is_new: bool) -> list[str]:
        """Return sentences about a saved row that people must have read before it is committed."""
        return []

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Save the row. First read the bills before the edit, for `_question`: a new row can change some too."""
        compare_bills = AsksBeforeSaving.compare_bills
        if request.method == "POST" and not is_confirmed(request) and compare_bills is not None:
            request.compared_bills = compare_bills(self.billed_accounts(obj))  # type: ignore[attr-defined]
        super().save_model(request, obj, form, change)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        return self._question(request, obj, is_new=True) or super().response_add(request, obj, post_url_continue)

    def response_change(self, request: HttpRequest, obj: Any) -> HttpResponse:
        return self._question(request, obj, is_new=False) or super().response_change(request, obj)

    def _question(self, request: HttpRequest, row: Any, *, is_new: bool) -> HttpResponse | None:
        """Return the page that asks, if there are doubts about the saved edit; None if it must be committed.

        The status of the page is 200, so `AuditedAdmin` rolls the edit back.
        """
        if is_confirmed(request):
            return None
        compared = getattr(request, "compared_bills", None)
        changed = (compared and compared(self.billed_accounts(row))) or Consequences("", ())
        warnings = [*self.doubts(request, row, is_new=is_new), *changed.warnings]
        if not warnings:
            return None
        consequences = changed._replace(title=str(_("Save: %(row)s") % {"row": row}), warnings=warnings)
        return confirmation(request, self.admin_site, self.model._meta, consequences, request.get_full_path())
