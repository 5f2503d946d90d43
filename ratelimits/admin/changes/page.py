"""The page that lists all changes of the configuration. Other pages show the table of this page too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.changes.rows import ChangedRow, changed_rows
from ratelimits.admin.changes.undoing import undoing
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.models import Access, Change, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.accounts import PlanPart
from ratelimits.models.versioned import Versioned, versioned_models
from ratelimits.moments import moment

#: Number of changes on a page.
PER_PAGE = 50
#: Highest value of `?skip=`.
MAX_SKIP = 10_000
#: Tables whose rows can be ended. A user who may not delete a row can end the row.
ENDABLE: tuple[type[Versioned], ...] = (Access, KeyOverride)
#: For some tables: the text of the link that deletes an added row. It says what the deletion means.
_DELETION_TEXTS: dict[Any, Any] = {
    Rule: gettext_lazy("Undo: delete the rule, which then limits nothing"),
    KeyOverride: gettext_lazy("Undo: delete the override; the numbers of the rule apply again"),
    PlanMembership: gettext_lazy("Undo: take the key off the plan again"),
}


class ShownChange(NamedTuple):
    """A line of the table of changes.

    what      the table and the name of the changed row
    url       the page with the history of the changed row
    undo      the text of the link that undoes the change. If `undo_url` is "", the reason why there is no such link
    undo_url  the URL of that link, or ""
    """

    when: str
    who: str
    what: str
    url: str
    row: ChangedRow
    reason: str
    undo: str
    undo_url: str


def visible_models(site: AdminSite, request: HttpRequest) -> list[type[Versioned]]:
    """Return the tables of the configuration that the user may view: with a plan, also what it consists of."""
    return [model for model in versioned_models() if _may(site, request, model, "view")]


def _may(site: AdminSite, request: HttpRequest, model: Any, action: str) -> bool:
    """Return whether the user may do an action with the rows of a table. `action` is part of a permission's name."""
    is_part = issubclass(model, PlanPart)  # People edit such rows on the page of their plan.
    page = site._registry.get(Plan if is_part else model)
    if page is None:
        return False
    # To add, change or delete such a row is to change its plan.
    permission = "change" if is_part and action != "view" else action
    return bool(getattr(page, f"has_{permission}_permission")(request))


def shown_change(site: AdminSite, request: HttpRequest, row: ChangedRow) -> ShownChange:
    """Return the line of the table for a changed row, with the links that the user may open."""
    record, instance, model = row.record, row.instance, row.model
    what = f"{model._meta.verbose_name} {instance}"
    if isinstance(instance, PlanPart):
        what += f" ({instance.plan})"
        history = reverse(f"{site.name}:ratelimits_plan_history", args=[record.plan_id])
        undo, undo_url = _("Change this row back on the page of its plan."), ""
    else:
        history = reverse(f"{site.name}:{model._meta.app_label}_{model._meta.model_name}_history", args=[instance.pk])
        undo, undo_url = _undo(site, request, row)
    return ShownChange(*_when_and_who(row), what, history, row, _reason(row), undo, undo_url)


def _undo(site: AdminSite, request: HttpRequest, row: ChangedRow) -> tuple[str, str]:
    """Return the text and the URL of the link that undoes a change. If there is no link, return the reason and "".

    If a later change follows an edit, the link shows the row's state before the edit.
    """
    record, model, name = row.record, row.model, f"{site.name}:{row.model._meta.app_label}_{row.model._meta.model_name}"
    words = {"row": model._meta.verbose_name}
    if row.obstacle:
        return row.obstacle, ""
    if row.kind == "+":
        if not row.is_newest:
            return _("The %(row)s was changed or deleted later: see the later changes.") % words, ""
        if _may(site, request, model, "delete"):
            text = _DELETION_TEXTS.get(model, _("Undo: delete the %(row)s"))
            return text % words, reverse(f"{name}_delete", args=[record.id])
        if model in ENDABLE and _may(site, request, model, "change"):
            return _("Undo: end the %(row)s now") % words, reverse(f"{name}_end", args=[record.id])
        return _("You may not delete the %(row)s.") % words, ""
    if not _may(site, request, model, "change"):
        return _("You may not change the %(row)s.") % words, ""
    if row.kind == "-":
        if not row.is_newest:
            return _("The %(row)s was added again later.") % words, ""
        if not _may(site, request, model, "add"):
            return _("You may not add the %(row)s again.") % words, ""
        return _("Undo: add the %(row)s again") % words, _undo_url(site, record)
    if row.before is None:
        return _("The values before the change are not known."), ""
    if not row.is_newest:
        return _("State before the change"), _record_url(name, row.before)
    return _("Undo"), _undo_url(site, record)


def _record_url(name: str, record: Any) -> str:
    return reverse(f"{name}_simple_history", args=[record.id, record.history_id])


def _undo_url(site: AdminSite, record: Any) -> str:
    table = record.instance_type._meta.model_name
    return reverse(f"{site.name}:ratelimits_change_undo", args=[table, record.history_id])


def _when_and_who(row: ChangedRow) -> tuple[str, str]:
    return f"{row.record.history_date:%Y-%m-%d %H:%M:%S} UTC", str(row.record.history_user or "–")


def _reason(row: ChangedRow) -> str:
    return str(row.record.history_change_reason or "")


@admin.register(Change)
class ChangeAdmin(ReadOnlyAdmin):
    """The page that lists all changes of the tables that the user may view. It replaces Django's list of rows."""

    def get_urls(self) -> list[URLPattern]:
        """Return the URL of this page, and the URL that undoes a change. Single rows have no pages."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="ratelimits_change_changelist"),
            path("undo/<str:table>/<int:history_id>/", view(self.undo_view), name="ratelimits_change_undo"),
        ]

    def undo_view(self, request: HttpRequest, table: str, history_id: int) -> HttpResponse:
        """Show the effect of undoing a change of this table. If the user confirms, undo the change."""
        return undoing(request, self.admin_site, table, history_id)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show changes, newest first.

        `?table=` chooses one table. `?until=` (µs since 1970 UTC) leaves out all changes after this moment. `?skip=`
        leaves out this number of the newest changes that remain.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        models = visible_models(self.admin_site, request)
        table = request.GET.get("table", "")
        chosen_models = [model for model in models if model._meta.model_name == table] or models
        until, skip = _moment(request.GET.get("until", "")), _skip(request.GET.get("skip", ""))
        rows = changed_rows(chosen_models, until, skip, PER_PAGE + 1)
        context = {
            **self.admin_site.each_context(request),
            "title": _("All changes"),
            "opts": self.model._meta,
            "changes": [shown_change(self.admin_site, request, row) for row in rows[:PER_PAGE]],
            "older": _older_page(rows, until, skip, table) if len(rows) > PER_PAGE else "",
            "tables": [
                (model._meta.verbose_name_plural, f"?table={model._meta.model_name}", chosen_models == [model])
                for model in models
            ],
            "all_tables": chosen_models == models,
            **(extra_context or {}),
        }
        return TemplateResponse(request, "ratelimits/admin/changes.html", context)


def _moment(text: str) -> datetime | None:
    """Return the moment that a text (µs since 1970 UTC) names; None if it names no moment."""
    try:
        return moment(int(text)) if text.isdecimal() and len(text) <= 18 else None
    except OverflowError:
        return None


def _skip(text: str) -> int:
    return min(int(text), MAX_SKIP) if text.isdecimal() and len(text) <= 9 else 0


def _older_page(rows: list[ChangedRow], until: datetime | None, skip: int, table: str) -> str:
    """Return the query string of the next page.

    Its `until` is the moment of the last row on this page. Its `skip` is the number of rows with this moment that were
    already shown.
    """
    last: datetime = rows[PER_PAGE - 1].record.history_date
    shown = sum(row.record.history_date == last for row in rows[:PER_PAGE])
    shown += skip if last == until else 0
    microseconds = (last - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return "?" + urlencode({"until": microseconds, "skip": shown} | ({"table": table} if table else {}))
