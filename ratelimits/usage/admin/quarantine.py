"""Quarantined batches in the admin. A person accepts or discards each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.readonly import ReadOnlyAdmin, database_of
from ratelimits.usage.ledger import resolve
from ratelimits.usage.ledger.packet import values
from ratelimits.usage.models import QuarantinedBatch
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT

#: Maximum number of lines on the page of a quarantined batch.
_MAX_LINES = 50


@admin.register(QuarantinedBatch)
class QuarantinedBatchAdmin(ReadOnlyAdmin):
    """Batches about which a person must decide. Each row says why the batch was not written to the ledger.

    Before the decision, the watermark of the batch's shard does not advance.
    """

    list_display = ["__str__", "reason", "arrived_at", "resolution"]
    list_filter = [("resolved_at", admin.EmptyFieldListFilter)]
    actions = ["accept", "discard"]
    readonly_fields = ["missing_lines", "arrived_at"]
    fields = [
        "shard",
        "name",
        "reason",
        "arrived_at",
        "missing_lines",
        "resolution",
        "resolved_at",
        "content",
        "fields",
    ]

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may accept and discard batches."""
        user: Any = request.user
        return bool(user.has_perm("ratelimits_usage.resolve"))

    @admin.display(description=_("lines that the ledger does not have"))
    def missing_lines(self, quarantined: QuarantinedBatch) -> str:
        """Return, as HTML, the lines that `accept` would add to the ledger."""
        if quarantined.resolved_at is not None:
            return "–"
        try:
            lines = resolve.missing_lines(database_of(quarantined), quarantined)
        except resolve.UnresolvableError as error:
            return str(error)
        if not lines:
            return str(_("None: the ledger has all lines of the batch."))
        rows = [dict(zip((*SUBJECT, *COUNTERS), values(line), strict=True)) for line in lines[:_MAX_LINES]]
        shown = ((row["account"], row["key"], row["admitted_units"], row["meter"]) for row in rows)
        first_lines = format_html_join("", "<div>{} {}: {} {}</div>", shown)
        if len(lines) <= _MAX_LINES:
            return first_lines
        return format_html("{}<div>{}</div>", first_lines, _("%(n)d lines in all") % {"n": len(lines)})

    @admin.action(
        description=_("Accept the selected batches: add their missing lines to the ledger"), permissions=["resolve"]
    )
    def accept(self, request: HttpRequest, queryset: QuerySet[QuarantinedBatch]) -> HttpResponse | None:
        """Show the lines that the ledger does not have. When the user confirms, add these lines to the ledger."""
        meaning = _("The missing lines are added to the ledger, and reports bill them.")
        return self._resolve(request, queryset, resolve.accept, str(_("Accept")), str(meaning))

    @admin.action(description=_("Discard the selected batches: leave the ledger as it is"), permissions=["resolve"])
    def discard(self, request: HttpRequest, queryset: QuerySet[QuarantinedBatch]) -> HttpResponse | None:
        """Show the lines that the ledger does not have. When the user confirms, discard the batches."""
        meaning = _("The ledger stays as it is: the missing lines are never billed.")
        return self._resolve(request, queryset, resolve.discard, str(_("Discard")), str(meaning))

    def _resolve(
        self,
        request: HttpRequest,
        queryset: QuerySet[QuarantinedBatch],
        action: Callable[[str, int, str], str],
        title: str,
        meaning: str,
    ) -> HttpResponse | None:
        batches = queryset.order_by("arrived_at", "pk")
        is_confirmed = bool(request.POST.get("post"))
        if not is_confirmed:
            context = {
                **self.admin_site.each_context(request),
                "opts": self.model._meta,
                "title": title,
                "meaning": meaning,
                "batches": [(quarantined, self.missing_lines(quarantined)) for quarantined in batches],
                "action": request.POST["action"],
                "checkbox_name": ACTION_CHECKBOX_NAME,
            }
            return TemplateResponse(request, "ratelimits/admin/resolve_batches.html", context)
        for quarantined in batches:
            try:
                resolution = action(queryset.db, quarantined.pk, request.user.get_username())
            except resolve.UnresolvableError as error:
                self.message_user(request, f"{quarantined}: {error}", messages.ERROR)
                continue
            self.log_change(request, quarantined, resolution)
            self.message_user(request, f"{quarantined}: {resolution}", messages.SUCCESS)
        return None
