"""Adjustments in the admin. With an adjustment, a person adds units to a period, or takes units off the period.

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
from django.db.models import Field, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.admin.readonly import BoundedPaginator, OwnTransactions
from ratelimits.admin.searched import AccountSearch
from ratelimits.admin.suggestions import KeySuggestions
from ratelimits.admin.typed import TypedNumbers
from ratelimits.billing.admin.finalising import may_finalise
from ratelimits.billing.models import Adjustment
from ratelimits.billing.reports import adjusting
from ratelimits.billing.reports.closing import close
from ratelimits.billing.reports.statements.effect import Effect, effect_of
from ratelimits.conf import conf
from ratelimits.models.accounts.named import named

#: Names of three inputs on the page that shows the effect of a new adjustment:
#:
#: SEEN       the user has seen the effect
#: LARGE      the user confirms an adjustment of more units than were used in the period
#: REFERENCE  the reference of the adjustment. It is unique, so only the first POST of a page adds an adjustment
SEEN, LARGE, REFERENCE = "_effect_seen", "_large_meant", "_reference"


@admin.register(Adjustment)
class AdjustmentAdmin(KeySuggestions, AccountSearch, TypedNumbers, OwnTransactions):
    """The adjustments. Users add adjustments, but cannot change or delete them.

    To correct a wrong adjustment, a user adds another one.
    """

    class Media:
        css = {"all": ["ratelimits/lists.css"]}

    account_fields = ("account",)
    list_display = [
        *("payer", "period_start", "meter", "quantity", "reason", "made_by", "approval", "report"),
    ]
    list_select_related = ["report"]
    list_filter = [("report", admin.EmptyFieldListFilter), "approval"]
    search_fields = ["account__exact", "reason"]
    search_help_text = _("Search for a whole account (its identifier or its name), or for words of the reason.")
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
        """Return whether the user may approve and refuse adjustments.

        A user with the permission to change adjustments may do this, but cannot change anything else.
        """
        user: Any = request.user
        return bool(user.has_perm("ratelimits_billing.change_adjustment"))

    def has_finalise_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may finalise periods. The action `finalise` needs this permission."""
        return may_finalise(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Adjustment]:
        """Return the adjustments. Separate queries read the users, because users may be in another database."""
        return super().get_queryset(request).prefetch_related("author", "decided_by")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the adjustments whose account or reason fits the search, and whether duplicates are possible."""
        found, may_repeat = admin.ModelAdmin.get_search_results(self, request, queryset, search_term)
        if search_term:
            found |= queryset.filter(account__in=self.possible_accounts(request, search_term))
        return found, may_repeat

    @admin.display(description=_("account"), ordering="account")
    def payer(self, adjustment: Adjustment) -> str:
        """Return the account, or "anonymous" for usage without an account."""
        return adjustment.account or str(_("anonymous"))

    @admin.display(description=_("author"), ordering="created_at")
    def made_by(self, adjustment: Adjustment) -> str:
        """Return who added the adjustment, and on which day (in the current time zone)."""
        return f"{adjustment.author}, {moments.local(adjustment.created_at):%Y-%m-%d}"

    @admin.display(description=_("effect on the report"))
    def effect(self, adjustment: Adjustment) -> str:
        """Return the report's totals before and after the adjustment.

        Return "–" for an adjustment that is not saved, that was refused, or that is on a report.
        """
        if adjustment._state.adding or adjustment.report_id is not None or adjustment.approval == "refused":
            return "–"
        try:
            return _effect_sentence(effect_of(adjustment))
        except ValueError as error:  # The account's time zone no longer exists.
            return str(error)

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest | None, **kwargs: Any) -> Any:
        """Return the field. The help of the moment names the time zone in which the moment is read."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and db_field.name == "period_start":
            zone = _("In the time zone %(zone)s.") % {"zone": moments.zone_name()}
            field.help_text = format_lazy("{} {}", field.help_text, zone)
        return field

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        initial: dict[str, Any] = super().get_changeform_initial_data(request)
        # A link to the form can contain the start of the period, in ISO 8601. Ignore a start in another format.
        with suppress(ValueError, KeyError):
            initial["period_start"] = datetime.fromisoformat(initial["period_start"])
        if isinstance(initial.get("period_start"), str):
            del initial["period_start"]
        return initial

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the effect of a valid adjustment on the report. Save the adjustment if the user has seen the effect.

        A large adjustment is saved only if the user has also ticked the box LARGE.
        """
        if request.method == "POST" and self.has_add_permission(request):
            form: Any = self.get_form(request)(request.POST)
            if form.is_valid():
                page = self._effect_page(request, form.instance)
                if page is not None:
                    return page
        try:
            return super().add_view(request, form_url, extra_context)
        except IntegrityError:
            # The page was posted twice at the same time, and the other request has saved the adjustment.
            saved = self._saved_before(request)
            if saved is None:
                raise
            return saved

    def _saved_before(self, request: HttpRequest) -> HttpResponse | None:
        """Return a response with a warning if an earlier POST of this page saved the adjustment; otherwise None."""
        reference = _reference(request)
        saved = None if reference is None else Adjustment.objects.filter(reference=reference).first()
        if saved is None:
            return None
        text = _("The adjustment was already saved: %(adjustment)s.") % {"adjustment": saved}
        self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_billing_adjustment_changelist"))

    def _effect_page(self, request: HttpRequest, adjustment: Adjustment) -> HttpResponse | None:
        """Return the page that shows the effect; None if the adjustment must be saved now.

        If an earlier POST of the page saved the adjustment, return a response that says so. If the effect cannot be
        computed, show a warning, and return None.
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
            % {"adjustment": adjustment, "start": moments.local_text(adjustment.period_start)},
            "opts": self.model._meta,
            "effect": effect,
            "meter": adjustment.meter,
            "typed": typed,
            "seen": SEEN,
            "large": LARGE,
            # The user has seen the effect, but has not ticked the box that a large adjustment needs.
            "unconfirmed": SEEN in request.POST,
            "approval": conf.ADJUSTMENT_APPROVAL,
        }
        return TemplateResponse(request, "ratelimits/admin/adjustment_effect.html", context)

    def save_model(self, request: HttpRequest, obj: Adjustment, form: Any, change: bool) -> None:
        obj.author = request.user  # type: ignore[assignment]
        obj.reference = _reference(request) or obj.reference
        super().save_model(request, obj, form, change)
        if obj.approval == Adjustment.Approval.WAITING:
            text = _("Reports do not include the adjustment until another person has approved it.")
            self.message_user(request, text, messages.WARNING)

    @admin.action(description=_("Approve the selected adjustments"), permissions=["approve"])
    def approve(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Approve adjustments that other people added."""
        self._decide(request, queryset, adjusting.approve, str(_("approved")))

    @admin.action(description=_("Refuse the selected adjustments"), permissions=["approve"])
    def refuse(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Refuse adjustments that other people added."""
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

    @admin.action(description=_("Put the selected adjustments on reports now"), permissions=["finalise"])
    def finalise(self, request: HttpRequest, queryset: QuerySet[Adjustment]) -> None:
        """Finalise all periods that can be closed, for the customers of these adjustments.

        Without this action, the worker finalises these periods later.
        """
        unreported = queryset.filter(report=None, approval__in=Adjustment.REPORTABLE).order_by()
        for customer in named(queryset.db, set(unreported.values_list("customer", flat=True))):
            for report in close.finalise(account=customer.present[0]):
                self.message_user(request, _("Report %(report)s was finalised.") % {"report": report}, messages.SUCCESS)
        # Read each adjustment again: it can now be on a report.
        for adjustment in queryset.select_related("report").order_by("pk"):
            values = {"adjustment": adjustment, "report": adjustment.report}
            if adjustment.report is not None:
                self.message_user(request, _("%(adjustment)s is on report %(report)s.") % values, messages.SUCCESS)
            elif adjustment.approval == Adjustment.Approval.WAITING:
                self.message_user(request, _("%(adjustment)s waits for approval.") % values, messages.WARNING)
            elif adjustment.approval in Adjustment.REPORTABLE:
                text = _(
                    "%(adjustment)s waits until its period is closed. The report will then contain the adjustment."
                )
                self.message_user(request, text % values, messages.WARNING)
            else:
                self.message_user(request, _("%(adjustment)s was refused.") % values, messages.WARNING)


def _reference(request: HttpRequest) -> UUID | None:
    """Return the reference in a POST of the page that shows the effect; None in a POST of the form itself."""
    try:
        return UUID(request.POST.get(REFERENCE, ""))
    except ValueError:
        return None


def _effect_sentence(effect: Effect) -> str:
    text = _(
        "before the adjustment, {before} units are billed ({overage_before} of them overage); after the adjustment,"
        " {after} units are billed ({overage_after} of them overage); {used} units were used"
    )
    if effect.owed is not None:
        text = format_lazy(
            "{}{}", text, _("; owed for the period: {owed_before} {currency} before, {owed_after} {currency} after")
        )
    if not effect.version:  # The period has no report yet.
        text = format_lazy("{} ({})", text, _("provisional: the period is open"))
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
