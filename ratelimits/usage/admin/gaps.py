"""Durability gaps in the admin. A person can acknowledge a gap: then the status page does not warn of it any more."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ratelimits import moments
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.searched import AccountSearch
from ratelimits.usage.admin.ledger import moment_text
from ratelimits.usage.models import DurabilityGap

#: The permission to acknowledge gaps.
ACKNOWLEDGE = "ratelimits_usage.acknowledge"
#: Maximum number of gaps that the page of an acknowledgement lists.
_MAX_ROWS = 50


class AcknowledgementForm(forms.Form):
    """A form that asks why the gaps need no more attention."""

    required_css_class = "required"
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)


class OpenGapFilter(admin.SimpleListFilter):
    """A filter for the gaps of which the status page warns."""

    title = gettext_lazy("open")
    parameter_name = "open"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("1", gettext_lazy("Yes")), ("0", gettext_lazy("No"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        is_open = {"recovered_at": None, "acknowledged_at": None, "harmless": False}
        chosen = {"1": queryset.filter, "0": queryset.exclude}.get(self.value() or "")
        return chosen(**is_open) if chosen else queryset


@admin.register(DurabilityGap)
class DurabilityGapAdmin(AccountSearch, ReadOnlyAdmin):
    """The gaps: spans of time in which usage may be missing."""

    list_display = [
        "what",
        "shard",
        "account",
        "from_",
        "to",
        "fsync",
        "missing",
        "harmless",
        "recovered_at",
        "reason",
    ]
    list_filter = [OpenGapFilter, "kind"]
    sortable_by = ()
    actions = ["acknowledge"]
    exclude = ["since", "until", "answered"]
    readonly_fields = ["from_", "to", "declared_at"]

    def has_acknowledge_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may acknowledge gaps."""
        return request.user.has_perm(ACKNOWLEDGE)

    @admin.display(description=gettext_lazy("kind"))
    def what(self, gap: DurabilityGap) -> str:
        """Return what happened, in words."""
        return gap.restarted() or gap.get_kind_display()

    @admin.display(description=gettext_lazy("from"))
    def from_(self, gap: DurabilityGap) -> str:
        """Return the start of the gap."""
        return moment_text(gap.since)

    @admin.display(description=gettext_lazy("to"))
    def to(self, gap: DurabilityGap) -> str:
        """Return the end of the gap."""
        return moment_text(gap.until)

    @admin.display(description=gettext_lazy("known to be missing"))
    def missing(self, gap: DurabilityGap) -> str:
        """Return the units that are known to be missing, and the requests if they are known. One column is narrower."""
        if gap.units is None:
            return "–"
        units = ngettext("%(n)s unit", "%(n)s units", gap.units) % {"n": f"{gap.units:,}"}
        if gap.requests is None:
            return units
        requests = ngettext("%(n)s request", "%(n)s requests", gap.requests) % {"n": f"{gap.requests:,}"}
        return f"{units} ({requests})"

    @admin.action(description=gettext_lazy("Acknowledge the selected gaps"), permissions=["acknowledge"])
    def acknowledge(self, request: HttpRequest, queryset: QuerySet[DurabilityGap]) -> HttpResponse | None:
        """Ask for a reason. When the user confirms, store it with the gaps. Reports still print the gaps."""
        gaps = list(queryset.filter(acknowledged_at=None).order_by("since", "pk"))
        if not gaps:
            self.message_user(request, _("The selected gaps are acknowledged already."), messages.WARNING)
            return None
        form = AcknowledgementForm(request.POST if is_confirmed(request) else None)
        if not is_confirmed(request) or not form.is_valid():
            consequences = Consequences(
                _("Acknowledge gaps"),
                [_("The status page does not warn of these gaps any more. Reports still print them.")],
                heads=[_("gap"), _("detail")],
                rows=[(gap, gap.detail) for gap in gaps[:_MAX_ROWS]],
            )
            back = reverse(f"{self.admin_site.name}:ratelimits_usage_durabilitygap_changelist")
            return confirmation(request, self.admin_site, self.model._meta, consequences, back, form=form)
        reason, who = form.cleaned_data["reason"], request.user.get_username()
        for gap in gaps:
            rows = queryset.model.objects.using(queryset.db).filter(pk=gap.pk, acknowledged_at=None)
            if rows.update(acknowledged_at=moments.now(), acknowledged_by=who[:150], reason=reason):
                self.log_change(request, gap, _("Acknowledged: %(reason)s") % {"reason": reason})
        self.message_user(request, _("%(count)d gaps were acknowledged.") % {"count": len(gaps)}, messages.SUCCESS)
        return None
