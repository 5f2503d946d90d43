"""The list of open periods with the reason why each is open, and a page that closes a period by force.

To close a period by force is to write its final report although usage may be missing.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext_lazy as _

from ratelimits.billing.admin.finalising import FinaliseView, chosen_value, may_finalise
from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.open_periods import NotForcedError, OpenPeriod, force, open_periods
from ratelimits.conf import conf
from ratelimits.models.accounts.named import of_tokens
from ratelimits.usage.admin.ledger import moment_text, month_text, period_text
from ratelimits.usage.models import QuarantinedBatch
from ratelimits.usage.periods import checked_month

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Report]
else:
    _Base = object

#: Maximum number of periods on the page. The command `ratelimits_finalise --open` lists all periods.
_MAX_ROWS = 200
#: The latest start of a period that the form accepts (µs since 1970 UTC, in the year 5138).
_MAX_START = 10**17


class ForceForm(forms.Form):
    """The form that closes a period by force."""

    customer = forms.CharField(widget=forms.HiddenInput, max_length=16)
    start = forms.IntegerField(widget=forms.HiddenInput, min_value=0, max_value=_MAX_START)
    reason = forms.CharField(label=_("Reason"), max_length=300, widget=forms.TextInput(attrs={"size": 60}))


class OpenPeriods(_Base):
    """Mixin for the admin page of reports: a page lists the periods that have no report yet.

    Users who may view reports see this page. If they may also finalise periods, they can choose periods to finalise, or
    close a period by force.
    """

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs. The URLs of these pages come first, because Django's last URL pattern matches every path."""
        view = self.admin_site.admin_view
        return [
            path("open/", view(self.open_view), name="ratelimits_billing_report_open"),
            path("finalise/", view(self.finalise_view), name="ratelimits_billing_report_finalise"),
            path("force/", view(self.force_view), name="ratelimits_billing_report_force"),
            *super().get_urls(),
        ]

    def _may_finalise(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request) and may_finalise(request)

    def open_view(self, request: HttpRequest) -> HttpResponse:
        """List the periods that are still open although their months are over, each with the reason why it is open.

        With `?account=`, list only the periods of the customer whom this account names now. With `?running=1`,
        also list periods whose months are not over. With `?month=2026-11`, list all open periods of this month.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        account, running = request.GET.get("account", ""), "running" in request.GET
        # PostgreSQL refuses a text with a null character.
        month = request.GET.get("month", "")
        try:
            chosen = checked_month(month) if month else None
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_billing_report_open"))
        found = (
            open_periods(account=account or None, running=running, awaited=not running, month=chosen)
            if "\0" not in account
            else iter(())
        )
        # `open_periods` also yields some periods that are not awaited.
        listed = (period for period in found if period.awaited or running or chosen)
        quarantine_url = self._quarantine_url(request)
        rows = [_row(period, quarantine_url) for period in islice(listed, _MAX_ROWS + 1)]
        may_finalise_periods = self._may_finalise(request)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Open periods"),
            "opts": self.model._meta,
            "rows": rows[:_MAX_ROWS],
            "more": len(rows) > _MAX_ROWS,
            "account": account,
            "running": running,
            "month": month,
            "month_in_words": month_text(month) if month else "",
            "may_finalise": may_finalise_periods,
            "shows_checkboxes": may_finalise_periods and any(row["complete"] for row in rows),
        }
        return TemplateResponse(request, "ratelimits/admin/open_periods.html", context)

    def _quarantine_url(self, request: HttpRequest) -> str:
        """Return the URL of the list of quarantined batches; "" if the user may not view them."""
        batches = self.admin_site.get_model_admin(QuarantinedBatch)
        if not batches.has_view_permission(request):
            return ""
        return reverse(f"{self.admin_site.name}:ratelimits_usage_quarantinedbatch_changelist")

    def finalise_view(self, request: HttpRequest) -> HttpResponse:
        """Show the reports of the chosen periods. After the user has confirmed, write them."""
        if not self._may_finalise(request):
            raise PermissionDenied
        back = reverse(f"{self.admin_site.name}:ratelimits_billing_report_open")
        return FinaliseView(self.admin_site, self.model._meta, back).page(request)

    def force_view(self, request: HttpRequest) -> HttpResponse:
        """Show the form that asks for the reason. A valid POST of the form closes the period."""
        if not self._may_finalise(request):
            raise PermissionDenied
        initial = {name: request.GET[name] for name in ("customer", "start") if name in request.GET}
        form = ForceForm(request.POST) if request.method == "POST" else ForceForm(initial=initial)
        if request.method == "POST" and form.is_valid():
            values = form.cleaned_data
            try:
                report = force(values["customer"], values["start"], request.user.get_username(), values["reason"])
            except NotForcedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                self.log_addition(request, report, f"closed by force: {values['reason']}")
                self.message_user(request, _("Report %(report)s was finalised.") % {"report": report}, messages.SUCCESS)
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_billing_report_open"))
        start = form.data.get("start") or form.initial.get("start") or ""
        token = form.data.get("customer") or form.initial.get("customer") or ""
        account = of_tokens(conf.DATABASE, [token.replace("\0", "")]).popitem()[1].account or _("anonymous")
        is_number = start.isascii() and start.isdecimal() and len(start) < len(str(_MAX_START))
        context = {
            **self.admin_site.each_context(request),
            "title": _("Close by force: %(account)s, %(start)s")
            % {"account": account, "start": moment_text(int(start)) if is_number else "–"},
            "opts": self.model._meta,
            "form": form,
        }
        return TemplateResponse(request, "ratelimits/admin/force_period.html", context)


def _row(period: OpenPeriod, quarantine_url: str) -> dict[str, Any]:
    """Return a row of the page. `quarantine_url` is the URL of the list of quarantined batches; "" for no links."""
    linked_shards = period.quarantined if quarantine_url else ()
    period_with_end = period.period
    return {
        "account": period.account,
        "customer": period.token,
        "start": period.start,
        "period": (
            period_text(period_with_end.start, period_with_end.end, period_with_end.timezone)
            if period_with_end is not None
            else f"{moment_text(period.start)} – ?"
        ),
        "units": [f"{count:,} {meter}" for meter, count in period.units.items()],
        "over": period.over,
        "why": period.why,
        "complete": period.complete,
        "value": chosen_value(period.token, period.start),
        "quarantined": [
            (f"{shard:02d}", f"{quarantine_url}?{urlencode({'resolved_at__isempty': 1, 'shard': shard})}")
            for shard in linked_shards
        ],
    }
