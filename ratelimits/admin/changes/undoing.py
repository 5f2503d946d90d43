"""The page that undoes the last change of a row. It first shows the effect of the undo."""

from __future__ import annotations

from copy import copy
from typing import Any

from django.contrib import messages
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router, transaction
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _

from ratelimits.admin.audited import BEFORE_MOVE, ReasonForm, recorded_user
from ratelimits.admin.changes.rows import ChangedRow, changed_rows
from ratelimits.admin.operate.confirming import (
    AsksBeforeSaving,
    Consequences,
    changed_bills,
    confirmation,
    is_confirmed,
)
from ratelimits.models import Change
from ratelimits.models.versioned import versioned_models
from ratelimits.models.versions import editing


def undoing(request: HttpRequest, site: AdminSite, table: str, history_id: int) -> HttpResponse:
    """Show the effect of undoing a change. If the user confirms, undo the change.

    `history_id` names a record in the history of a table. Raise PermissionDenied if the user may not undo the change.
    Raise Http404 if there is no such change, if the change added the row, or if the values before the change are not
    known.
    """
    model: Any = next((model for model in versioned_models() if model._meta.model_name == table), None)
    page: Any = site._registry.get(model)
    if page is None:
        raise Http404
    if not page.has_change_permission(request):
        raise PermissionDenied
    if not is_confirmed(request):
        response, _is_undone = _answer(request, page, history_id, ReasonForm())
        return response
    using = router.db_for_write(model)
    # In this block, nobody else can edit the row.
    with recorded_user(request), editing(using):
        response, is_undone = _answer(request, page, history_id, ReasonForm(request.POST))
        if not is_undone:
            transaction.set_rollback(True, using=using)
        return response


def _answer(request: HttpRequest, page: Any, history_id: int, form: ReasonForm) -> tuple[HttpResponse, bool]:
    """Return the response, and whether the change was undone. An unbound form means that the user has not confirmed."""
    change = next(iter(changed_rows([page.model], None, 0, 1, Q(history_id=history_id))), None)
    if change is None:
        raise Http404
    # The record with the values to restore.
    former = change.record if change.kind == "-" else change.before
    if former is None:
        raise Http404  # If the change added the row, users undo the change on the page that deletes the row.
    if change.kind == "-" and not page.has_add_permission(request):
        raise PermissionDenied
    name = f"{page.admin_site.name}:{page.model._meta.app_label}_{page.model._meta.model_name}"
    obstacle = change.obstacle or (BEFORE_MOVE if page.is_before_move(former.id, former.history_id) else "")
    if obstacle or not change.is_newest:
        text = _("The row was changed again after this change. Choose one of its former states.")
        messages.warning(request, obstacle or text)
        return HttpResponseRedirect(reverse(f"{name}_history", args=[former.id])), False
    row = former.instance
    row._state.adding = change.kind == "-"
    try:
        # `full_clean` may change values, so it checks a copy. The row gets exactly its former values.
        copy(row).full_clean()
    except ValidationError as error:
        text = _("The former values are no longer valid. Correct them, then save: %s") % " ".join(error.messages)
        messages.error(request, text)
        return HttpResponseRedirect(reverse(f"{name}_simple_history", args=[former.id, former.history_id])), False
    back = _back(page, request, reverse(f"{name}_changelist"))
    if form.is_valid():
        page.save_model(request, row, None, change=True)
        fields = [difference.field for difference in change.differences]
        page.log_change(request, row, [{"changed": {"fields": fields}}])
        messages.success(request, _("Undone: %s has its former values again.") % row)
        return HttpResponseRedirect(back), True
    consequences = _consequences(change, *page.effect_of(request, row))
    bills = None
    if isinstance(page, AsksBeforeSaving):
        bills = changed_bills(
            router.db_for_write(page.model),
            lambda: page.billed_accounts(row),
            lambda: page.save_model(request, copy(row), None, change=True),
        )
    return confirmation(request, page.admin_site, page.model._meta, consequences, back, form=form, bills=bills), False


def _back(page: Any, request: HttpRequest, list_url: str) -> str:
    """Return the URL of the page of all changes; `list_url` if the user may not view that page."""
    changes = page.admin_site._registry.get(Change)
    if changes is None or not changes.has_view_permission(request):
        return list_url
    return reverse(f"{page.admin_site.name}:ratelimits_change_changelist")


def _consequences(change: ChangedRow, sentences: list[str], warnings: list[str]) -> Consequences:
    """Return a table of the fields that change back, below sentences about the change and about the former values."""
    record = change.record
    about = {
        "row": f"{change.model._meta.verbose_name} {change.instance}",
        "did": change.did,
        "when": f"{record.history_date:%Y-%m-%d %H:%M:%S} UTC",
        "who": record.history_user or "–",
    }
    done = _("%(row)s was %(did)s at %(when)s by %(who)s.") % about
    if record.history_change_reason:
        done += " " + _("Reason: %s") % record.history_change_reason
    rows: list[tuple[str, ...]]
    if change.kind == "-":
        title, heads = _("Undo: add %(row)s again") % about, [_("field"), _("value")]
        rows = [(difference.field, difference.before) for difference in change.differences]
    else:
        title, heads = _("Undo the change of %(row)s") % about, [_("field"), _("now"), _("after undoing")]
        rows = [(difference.field, difference.after, difference.before) for difference in change.differences]
    return Consequences(title, [done, *sentences], warnings, heads, rows)
