"""Adjustments in the admin: people see what they make of the report, then save; others approve, if a setting asks."""

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

#: What the page that shows the effect sends along: that it was seen, that more than all usage is meant, and the
#: reference that the adjustment will have: who posts the page twice means one adjustment.
SEEN, LARGE, REFERENCE = "_effect_seen", "_large_meant", "_reference"


@admin.register(Adjustment)
class AdjustmentAdmin(TypedNumbers, admin.ModelAdmin):  # type: ignore[type-arg]
    """Adjustments are made, and never changed or taken back: what was wrong is adjusted again."""

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
        """Return whether the user may approve and refuse: adjustments are never changed otherwise."""
        user: Any = request.user
        return bool(user.has_perm("ratelimits.change_adjustment"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Adjustment]:
        """Read the users by queries of their own: they may be in another database."""
        return super().get_queryset(request).prefetch_related("author", "decided_by")

    @admin.display(description=_("account"), ordering="account")
    def payer(self, adjustment: Adjustment) -> str:
        """Who pays."""
        return adjustment.account or str(_("anonymous"))

    @admin.display(description=_("author"))
    def made_by(self, adjustment: Adjustment) -> str:
        """Who made it."""
        return str(adjustment.author)

    @admin.display(description=_("what it makes of the report"))
    def effect(self, adjustment: Adjustment) -> str:
        """What the report says before and after it, as long as none has it."""
        if adjustment._state.adding or adjustment.report_id is not None or adjustment.approval == "refused":
            return "–"
        try:
            return _sentence(effect_of(adjustment))
        except ValueError as error:  # the account's time zone is no more
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
        """Show what a valid adjustment makes of the report, and save it only when that was seen."""
        if request.method == "POST" and self.has_add_permission(request):
            form: Any = self.get_form(request)(request.POST)
            if form.is_valid():
                asked = self._effect_page(request, form.instance)
                if asked is not None:
                    return asked
        try:
            return super().add_view(request, form_url, extra_context)
        except IntegrityError:
            # The same page, posted twice at once: the other request was faster.
            saved = self._saved_before(request)
            if saved is None:
                raise
            return saved

    def _saved_before(self, request: HttpRequest) -> HttpResponse | None:
        """Return the answer to a page that was posted before; None if it is new."""
        reference = _reference(request)
        made = None if reference is None else Adjustment.objects.filter(reference=reference).first()
        if made is None:
            return None
        text = _("It was saved before, once: %(adjustment)s.") % {"adjustment": made}
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_adjustment_changelist"))

    def _effect_page(self, request: HttpRequest, adjustment: Adjustment) -> HttpResponse | None:
        """The page that shows the effect, or says that it was saved before; None when the effect was seen."""
        if (saved := self._saved_before(request)) is not None:
            return saved
        try:
            effect = effect_of(adjustment)
        except ValueError as error:
            self.message_user(request, _("What it makes of the report cannot be said: %s") % error, messages.WARNING)
            return None
        if request.POST.get(SEEN) and (request.POST.get(LARGE) or not effect.is_large):
            return None
        left = (SEEN, LARGE, REFERENCE, "csrfmiddlewaretoken")
        kept = {name: value for name, value in request.POST.items() if name not in left}
        kept[REFERENCE] = str(_reference(request) or adjustment.reference)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Adjust: %(adjustment)s, %(start)s")
            % {"adjustment": adjustment, "start": f"{adjustment.period_start:%Y-%m-%d %H:%M:%S %Z}"},
            "opts": self.model._meta,
            "effect": effect,
            "meter": adjustment.meter,
            "kept": kept,
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
            self.message_user(request, _("It counts when another person has approved it."), messages.WARNING)

    @admin.action(description=_("Approve: let them count"), permissions=["approve"])
    def approve(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Let adjustments of other people count."""
        self._decide(request, queryset, adjusting.approve, str(_("approved")))

    @admin.action(description=_("Refuse: let them never count"), permissions=["approve"])
    def refuse(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Let adjustments of other people never count."""
        self._decide(request, queryset, adjusting.refuse, str(_("refused")))

    def _decide(self, request: HttpRequest, queryset: QuerySet[Adjustment], decide: Any, done: str) -> None:
        for adjustment in queryset.order_by("pk"):
            try:
                decide(adjustment, request.user)
            except adjusting.NotDecidedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                self.log_change(request, adjustment, done)
                self.message_user(request, f"{adjustment}: {done}", messages.SUCCESS)

    @admin.action(description=_("Put them on reports now"), permissions=["add"])
    def finalise(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Make the next versions of the reports that they are for, without waiting for the worker."""
        waiting = queryset.filter(report=None, approval__in=Adjustment.COUNTS).order_by("account")
        for account in list(waiting.values_list("account", flat=True).distinct()):
            for report in close.finalise(account=account):
                self.message_user(request, _("Report %(report)s was finalised.") % {"report": report}, messages.SUCCESS)
        # The worker may have been faster: what counts is where each stands now.
        for adjustment in queryset.select_related("report").order_by("pk"):
            values = {"adjustment": adjustment, "report": adjustment.report}
            if adjustment.report is not None:
                self.message_user(request, _("%(adjustment)s is on report %(report)s.") % values, messages.SUCCESS)
            elif adjustment.approval == Adjustment.Approval.WAITING:
                self.message_user(request, _("%(adjustment)s waits for approval.") % values, messages.WARNING)
            elif adjustment.approval in Adjustment.COUNTS:
                text = _("%(adjustment)s waits for its period, which is open: its report will have it.")
                self.message_user(request, text % values, messages.WARNING)
            else:
                self.message_user(request, _("%(adjustment)s was refused.") % values, messages.WARNING)


def _reference(request: HttpRequest) -> UUID | None:
    """Return the reference that the page which shows the effect gave the adjustment; None without that page."""
    try:
        return UUID(request.POST.get(REFERENCE, ""))
    except ValueError:
        return None


def _sentence(effect: Effect) -> str:
    text = _("{before} billed before ({overage} of them overage), {after} after ({over} overage); {used} were used")
    if effect.owed is not None:
        text = format_lazy("{}{}", text, _("; owed for the period: {was} {currency} before, {owed} after"))
    return format_html(
        str(text),
        was=effect.owed and effect.owed.before,
        owed=effect.owed and effect.owed.after,
        currency=effect.owed and effect.owed.currency,
        before=f"{effect.before.billed:,}",
        overage=f"{effect.before.overage:,}",
        after=f"{effect.after.billed:,}",
        over=f"{effect.after.overage:,}",
        used=f"{effect.used:,}",
    )
