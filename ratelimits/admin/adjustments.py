"""Adjustments in the admin: units that a person adds to a period, or takes off it.

Before an adjustment is saved, a page shows its effect on the report. If the settings require approval, another person
must approve the adjustment.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.db import IntegrityError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.readonly import BoundedPaginator
from ratelimits.admin.typed import TypedNumbers
from ratelimits.conf import conf
from ratelimits.models import Adjustment
from ratelimits.reports import adjusting
from ratelimits.reports.closing import close
from ratelimits.reports.statements.effect import Effect, effect_of

#: Inputs of the page that shows the effect. SEEN: the user has seen the effect. LARGE: the user intends to adjust by
#: more than all usage. REFERENCE: the new adjustment's reference, so that a page that is posted twice adds only one.
SEEN, LARGE, REFERENCE = "_effect_seen", "_large_meant", "_reference"


@admin.register(Adjustment)
class AdjustmentAdmin(TypedNumbers, admin.ModelAdmin):  # type: ignore[type-arg]
    """Adjustments: they are added, but never changed or deleted. A further adjustment corrects a wrong one."""

    list_display = [
        *("payer", "period_start", "meter", "quantity", "reason", "made_by", "created_at", "approval", "report"),
    ]
    list_select_related = ["report"]
    list_filter = [("report", admin.EmptyFieldListFilter), "approval"]
    search_fields = ["account__exact", "reason"]
    paginator = BoundedPaginator
    show_full_result_count = False
    fields = [
        *("account", "period_start", "meter", "key", "quantity", "corrects_line_id", "reason"),
        *("effect", "author", "created_at", "approval", "decided_by", "decided_at", "report", "reference"),
    ]
    readonly_fields = [
        *("effect", "author", "created_at", "approval", "decided_by", "decided_at", "report", "reference"),
    ]
    actions = ["approve", "refuse", "finalise"]

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_approve_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may approve and refuse. The permission to change adjustments allows only this."""
        user: Any = request.user
        return bool(user.has_perm("ratelimits.change_adjustment"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Adjustment]:
        """Read the users with separate queries, because they may be in another database."""
        return super().get_queryset(request).prefetch_related("author", "decided_by")

    @admin.display(description=_("account"), ordering="account")
    def payer(self, adjustment: Adjustment) -> str:
        """Return the account, or "anonymous"."""
        return adjustment.account or str(_("anonymous"))

    @admin.display(description=_("author"))
    def made_by(self, adjustment: Adjustment) -> str:
        """Return the user who added the adjustment."""
        return str(adjustment.author)

    @admin.display(description=_("effect on the report"))
    def effect(self, adjustment: Adjustment) -> str:
        """Return the report's totals before and after the adjustment; "–" if it is on a report or was refused."""
        if adjustment._state.adding or adjustment.report_id is not None or adjustment.approval == "refused":
            return "–"
        try:
            return _sentence(effect_of(adjustment))
        except ValueError as error:  # The account's time zone no longer exists.
            return str(error)

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        initial: dict[str, Any] = super().get_changeform_initial_data(request)
        with suppress(ValueError, KeyError):
            initial["period_start"] = datetime.fromisoformat(initial["period_start"])
        if isinstance(initial.get("period_start"), str):
            del initial["period_start"]
        return initial

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the effect of a valid adjustment on the report, and save it only after the effect was seen."""
        if request.method == "POST" and self.has_add_permission(request):
            form: Any = self.get_form(request)(request.POST)
            if form.is_valid():
                page = self._effect_page(request, form.instance)
                if page is not None:
                    return page
        try:
            return super().add_view(request, form_url, extra_context)
        except IntegrityError:
            # The same page was posted twice at the same time, and the other request was faster.
            saved = self._saved_before(request)
            if saved is None:
                raise
            return saved

    def _saved_before(self, request: HttpRequest) -> HttpResponse | None:
        """Return a response with a warning if this page was posted and saved before; None if it was not."""
        reference = _reference(request)
        saved = None if reference is None else Adjustment.objects.filter(reference=reference).first()
        if saved is None:
            return None
        text = _("The adjustment was already saved: %(adjustment)s.") % {"adjustment": saved}
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_adjustment_changelist"))

    def _effect_page(self, request: HttpRequest, adjustment: Adjustment) -> HttpResponse | None:
        """Return the page that shows the effect, or a warning if the page was posted before.

        Return None if the adjustment must be saved now.
        """
        if (saved := self._saved_before(request)) is not None:
            return saved
        try:
            effect = effect_of(adjustment)
        except ValueError as error:
            self.message_user(request, _("The effect on the report cannot be computed: %s") % error, messages.WARNING)
            return None
        if request.POST.get(SEEN) and (request.POST.get(LARGE) or not effect.is_large):
            return None
        excluded = (SEEN, LARGE, REFERENCE, "csrfmiddlewaretoken")
        typed = {name: value for name, value in request.POST.items() if name not in excluded}
        typed[REFERENCE] = str(_reference(request) or adjustment.reference)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Adjust: %(adjustment)s, %(start)s")
            % {"adjustment": adjustment, "start": f"{adjustment.period_start:%Y-%m-%d %H:%M:%S %Z}"},
            "opts": self.model._meta,
            "effect": effect,
            "meter": adjustment.meter,
            "typed": typed,
            "seen": SEEN,
            "large": LARGE,
            "unconfirmed": SEEN in request.POST,
            "approval": conf.ADJUSTMENT_APPROVAL,
        }
        return TemplateResponse(request, "ratelimits/admin/adjustment_effect.html", context)

    def save_model(self, request: HttpRequest, obj: Adjustment, form: Any, change: bool) -> None:
        obj.author = request.user  # type: ignore[assignment]
        obj.reference = _reference(request) or obj.reference
        super().save_model(request, obj, form, change)
        if obj.approval == Adjustment.Approval.WAITING:
            self.message_user(
                request, _("The adjustment counts once another person has approved it."), messages.WARNING
            )

    @admin.action(description=_("Approve the selected adjustments, so that they count"), permissions=["approve"])
    def approve(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Approve adjustments of other people."""
        self._decide(request, queryset, adjusting.approve, str(_("approved")))

    @admin.action(description=_("Refuse the selected adjustments, so that they never count"), permissions=["approve"])
    def refuse(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Refuse adjustments of other people."""
        self._decide(request, queryset, adjusting.refuse, str(_("refused")))

    def _decide(self, request: HttpRequest, queryset: QuerySet[Adjustment], decide: Any, decision: str) -> None:
        for adjustment in queryset.order_by("pk"):
            try:
                decide(adjustment, request.user)
            except adjusting.NotDecidedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                self.log_change(request, adjustment, decision)
                self.message_user(request, f"{adjustment}: {decision}", messages.SUCCESS)

    @admin.action(description=_("Put the selected adjustments on reports now"), permissions=["add"])
    def finalise(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Make new versions of the adjustments' reports now, without waiting for the worker."""
        waiting = queryset.filter(report=None, approval__in=Adjustment.COUNTS).order_by("account")
        for account in list(waiting.values_list("account", flat=True).distinct()):
            for report in close.finalise(account=account):
                self.message_user(request, _("Report %(report)s was finalised.") % {"report": report}, messages.SUCCESS)
        # The worker may have been faster, so read each adjustment again.
        for adjustment in queryset.select_related("report").order_by("pk"):
            values = {"adjustment": adjustment, "report": adjustment.report}
            if adjustment.report is not None:
                self.message_user(request, _("%(adjustment)s is on report %(report)s.") % values, messages.SUCCESS)
            elif adjustment.approval == Adjustment.Approval.WAITING:
                self.message_user(request, _("%(adjustment)s waits for approval.") % values, messages.WARNING)
            elif adjustment.approval in Adjustment.COUNTS:
                text = _("%(adjustment)s waits until its period is closed; then the report will contain it.")
                self.message_user(request, text % values, messages.WARNING)
            else:
                self.message_user(request, _("%(adjustment)s was refused.") % values, messages.WARNING)


def _reference(request: HttpRequest) -> UUID | None:
    """Return the reference that the page with the effect has sent; None if the form was posted directly."""
    try:
        return UUID(request.POST.get(REFERENCE, ""))
    except ValueError:
        return None


def _sentence(effect: Effect) -> str:
    text = _(
        "{before} billed before ({overage_before} of them overage), {after} after ({overage_after} overage);"
        " {used} used"
    )
    if effect.owed is not None:
        text = format_lazy(
            "{}{}", text, _("; owed for the period: {owed_before} {currency} before, {owed_after} {currency} after")
        )
    return format_html(
        str(text),
        owed_before=effect.owed and effect.owed.before,
        owed_after=effect.owed and effect.owed.after,
        currency=effect.owed and effect.owed.currency,
        before=f"{effect.before.billed:,}",
        overage_before=f"{effect.before.overage:,}",
        after=f"{effect.after.billed:,}",
        overage_after=f"{effect.after.overage:,}",
        used=f"{effect.used:,}",
    )
