"""Open periods in the admin: what each waits for, and closing one in spite of that."""

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

from ratelimits.admin.usage import shown
from ratelimits.models import QuarantinedBatch, Report
from ratelimits.reports.closing.open_periods import NotForcedError, OpenPeriod, force, open_periods

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Report]
else:
    _Base = object

#: Periods that the page shows; `ratelimits_finalise --open` shows all.
_MAX_ROWS = 200
#: No period starts later (µs since 1970 UTC): in the year 5138.
_LAST = 10**17


class ForceForm(forms.Form):
    """What closing by force asks for."""

    account = forms.CharField(widget=forms.HiddenInput, required=False, strip=False)
    start = forms.IntegerField(widget=forms.HiddenInput, min_value=0, max_value=_LAST)
    reason = forms.CharField(label=_("Reason"), max_length=300, widget=forms.TextInput(attrs={"size": 60}))


class OpenPeriods(_Base):
    """For the admin page of Report: the periods that are over and have none.

    Whoever may view reports sees them; whoever may add reports closes one by force.
    """

    def get_urls(self) -> list[URLPattern]:
        """The pages in front: the admin takes what is left for a primary key."""
        wrap = self.admin_site.admin_view
        return [
            path("open/", wrap(self.open_view), name="ratelimits_report_open"),
            path("force/", wrap(self.force_view), name="ratelimits_report_force"),
            *super().get_urls(),
        ]

    def has_force_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may close periods by force: reports are never added otherwise."""
        user: Any = request.user
        return bool(user.has_perm("ratelimits.add_report"))

    def open_view(self, request: HttpRequest) -> HttpResponse:
        """List the periods that are over and open, and what each waits for."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        over = (found for found in open_periods() if found.over)
        quarantine = self._quarantine(request)
        rows = [_row(found, quarantine) for found in islice(over, _MAX_ROWS + 1)]
        context = {
            **self.admin_site.each_context(request),
            "title": _("Open periods"),
            "opts": self.model._meta,
            "rows": rows[:_MAX_ROWS],
            "more": len(rows) > _MAX_ROWS,
            "may_force": self.has_force_permission(request),
        }
        return TemplateResponse(request, "ratelimits/admin/open_periods.html", context)

    def _quarantine(self, request: HttpRequest) -> str:
        """Return where the quarantined batches of a shard are listed; "" for those who may not see them."""
        batches = self.admin_site.get_model_admin(QuarantinedBatch)
        if not batches.has_view_permission(request):
            return ""
        return reverse(f"{self.admin_site.name}:ratelimits_quarantinedbatch_changelist")

    def force_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for the reason, then close the period."""
        if not (self.has_view_permission(request) and self.has_force_permission(request)):
            raise PermissionDenied
        asked = {name: request.GET[name] for name in ("account", "start") if name in request.GET}
        form = ForceForm(request.POST) if request.method == "POST" else ForceForm(initial=asked)
        if request.method == "POST" and form.is_valid():
            about = form.cleaned_data
            try:
                report = force(about["account"], about["start"], request.user.get_username(), about["reason"])
            except NotForcedError as error:
                self.message_user(request, str(error), messages.ERROR)
            else:
                self.log_addition(request, report, f"closed by force: {about['reason']}")
                self.message_user(request, _("Report %(report)s was finalised.") % {"report": report}, messages.SUCCESS)
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_report_open"))
        start = form.data.get("start") or form.initial.get("start") or ""
        account = form.data.get("account") or form.initial.get("account") or _("anonymous")
        known = start.isascii() and start.isdecimal() and len(start) < len(str(_LAST))
        context = {
            **self.admin_site.each_context(request),
            "title": _("Close by force: %(account)s, %(start)s")
            % {"account": account, "start": shown(int(start)) if known else "–"},
            "opts": self.model._meta,
            "form": form,
        }
        return TemplateResponse(request, "ratelimits/admin/force_period.html", context)


def _row(found: OpenPeriod, quarantine: str) -> dict[str, Any]:
    """Return a row of the page; `quarantine` is where quarantined batches are listed, "" where they are not shown."""
    shards = found.quarantined if quarantine else ()
    return {
        "account": found.account,
        "start": found.start,
        "starts": shown(found.start),
        "ends": shown(found.period.end) if found.period is not None else "–",
        "units": ", ".join(f"{count:,} {meter}" for meter, count in found.units.items()) or "–",
        "why": found.why,
        "quarantined": [
            (f"{shard:02d}", f"{quarantine}?{urlencode({'resolved_at__isempty': 1, 'shard': shard})}")
            for shard in shards
        ],
    }
