"""Blocks and allows in the admin."""

from __future__ import annotations

import time
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.db.models import QuerySet, Sum
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ratelimits.admin.audited import REASON, AuditedAdmin
from ratelimits.admin.completed import CompletedKeys
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.admin.operate.grants import GrantView
from ratelimits.admin.rules import InForceFilter
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import identify
from ratelimits.models import Access, ProcessTotal
from ratelimits.models.access.targets import addresses
from ratelimits.models.history import MAX_REASON
from ratelimits.rules.access import AccessIndex, of_model

_DAY = 86_400


def requests_of(targets: list[str] | None = None, seconds: int = _DAY) -> dict[str, int]:
    """Return, by target, the number of requests that blocks refused or allows exempted in the last `seconds`.

    Processes count these requests. A request with several meters counts once.
    """
    rows = ProcessTotal.objects.using(conf.DATABASE).filter(kind__in=("blocked", "exempt"))
    rows = rows.filter(bin__gte=int(time.time()) - seconds)
    if targets is not None:
        rows = rows.filter(key__in=[ledger_name(target) for target in targets])
    found: dict[str, int] = {}
    for key, _meter, requests in rows.order_by().values_list("key", "meter").annotate(Sum("requests")):
        found[key] = max(found.get(key, 0), requests)
    return found


class EndForm(forms.Form):
    """Asks why a block or allow ends."""

    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=MAX_REASON)


@admin.register(Access)
class AccessAdmin(CompletedKeys, AuditedAdmin):
    """Blocks and allows. They are ended, not deleted, so that the list also shows what was in force before."""

    change_list_template = "ratelimits/admin/access_change_list.html"
    key_fields = ("target",)
    list_filter = ["effect", InForceFilter]
    search_fields = ["target", "reason", "message"]
    actions = ["end_now"]
    readonly_fields = ["requests"]
    fieldsets = [
        (None, {"fields": ["effect", "target", "reason"]}),
        (gettext_lazy("When"), {"fields": ["valid_from", "valid_until"]}),
        (gettext_lazy("What a blocked client receives"), {"fields": ["status", "message"]}),
        (gettext_lazy("So far"), {"fields": ["requests"]}),
    ]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_operate(request) or super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return may_operate(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_operate(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        grants = GrantView(self.admin_site, self.model._meta)
        grant = path("grant/", self.admin_site.admin_view(grants.page), name="ratelimits_access_grant")
        return [grant, *super().get_urls()]

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns. The column of requests reads the totals only once for all rows."""
        counted: dict[str, int] | None = None

        @admin.display(description=gettext_lazy("requests in 24 hours"))
        def requests(row: Access) -> str:
            nonlocal counted
            if counted is None:
                counted = requests_of()
            return f"{counted.get(ledger_name(row.target), 0):,}"

        return ["target", "effect", "state", "valid_from", "valid_until", requests, "reason"]

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: Access) -> str:
        """Return whether the row is in force."""
        now = timezone.now()
        if row.in_force(now):
            return _("in force")
        return _("later") if row.valid_from is not None and row.valid_from > now else _("ended")

    @admin.display(description=gettext_lazy("requests in 30 days"))
    def requests(self, row: Access | None) -> str:
        """Return how many requests of the row's target were refused or exempted."""
        if row is None or row.pk is None:
            return "–"
        return f"{sum(requests_of([row.target], 30 * _DAY).values()):,}"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        context = {**(extra_context or {}), "may_operate": may_operate(request)}
        return super().changelist_view(request, context)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show what a valid form will do, and save it only after the user has confirmed it."""
        if request.method == "POST" and may_operate(request) and not is_confirmed(request):
            row = self.get_object(request, object_id) if object_id is not None else None
            if object_id is None or row is not None:
                form: Any = self.get_form(request, row, change=row is not None)(request.POST, instance=row)
                if form.is_valid():
                    back = reverse(f"{self.admin_site.name}:ratelimits_access_changelist")
                    opts = self.model._meta
                    return confirmation(request, self.admin_site, opts, consequences(request, form.instance), back)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave the reason of the change out for a new row, which has a reason of its own."""
        fieldsets: Any = super().get_fieldsets(request, obj)
        return fieldsets if obj is not None else [one for one in fieldsets if one[1]["fields"] != [REASON]]

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        obj._change_reason = (request.POST.get(REASON) or obj.reason)[:MAX_REASON]
        super().save_model(request, obj, form, change)

    @admin.action(description=gettext_lazy("End the selected blocks and allows now"), permissions=["change"])
    def end_now(self, request: HttpRequest, queryset: QuerySet[Access]) -> HttpResponse | None:
        """Ask for a reason, then end the rows that have not ended. Rows that have not begun are deleted."""
        now = timezone.now()
        rows = [row for row in queryset.order_by("pk") if row.valid_until is None or row.valid_until > now]
        if not rows:
            self.message_user(request, _("All of them have ended already."), messages.WARNING)
            return None
        form = EndForm(request.POST if is_confirmed(request) else None, initial={"reason": request.POST.get(REASON)})
        if not form.is_valid():
            shown = Consequences(
                _("End now"),
                [_("Requests of these are decided by the rules again, in every process within about a second.")],
                heads=[_("key or network"), _("effect"), _("reason")],
                rows=[(row.target, row.get_effect_display(), row.reason) for row in rows],
            )
            back = reverse(f"{self.admin_site.name}:ratelimits_access_changelist")
            return confirmation(request, self.admin_site, self.model._meta, shown, back, form=form)
        for row in rows:
            row.end(form.cleaned_data["reason"])
        assert request.user.pk is not None
        LogEntry.objects.log_actions(
            request.user.pk, rows, CHANGE, [{"changed": {"fields": ["valid_until"]}}], single_object=False
        )
        text = ngettext("%(n)d block or allow has ended.", "%(n)d blocks or allows have ended.", len(rows))
        self.message_user(request, text % {"n": len(rows)}, messages.SUCCESS)
        return None


def consequences(request: HttpRequest, row: Access) -> Consequences:
    """Return what an unsaved row will do, with a warning if it concerns the user who saves it."""
    blocks = row.effect == Access.Effect.BLOCK
    count, values = addresses(row.target), {"target": row.target, "status": row.status}
    if blocks:
        said = [_("Every request of %(target)s is refused with %(status)s, whatever the rules say.") % values]
    else:
        said = [_("No rule limits %(target)s. Its requests are not counted as usage and not billed.") % values]
    if count is not None and count > 1:
        ipv6 = ":" in row.target[3:]
        text = _("The network has %(n)s networks of one subscriber (/64).") if ipv6 else _("It has %(n)s addresses.")
        said.append(text % {"n": f"{count:,}"})
    elif row.target.startswith("account:"):
        said.append(_("That is all keys of the account."))
    begins = timezone.localtime(row.valid_from) if row.valid_from else None
    ends = timezone.localtime(row.valid_until) if row.valid_until else None
    said.append(
        (_("From %s") % f"{begins:%Y-%m-%d %H:%M %Z}" if begins else _("From the next request"))
        + " "
        + (_("until %s.") % f"{ends:%Y-%m-%d %H:%M %Z}" if ends else _("without an end."))
    )
    warnings = []
    if blocks and AccessIndex([of_model(row)._replace(valid_from=0)]).find(identify(request), 0) is not None:
        warnings.append(_("Your own requests are among them: the API will refuse you. This admin is not blocked."))
    return Consequences(_("Block %(target)s") % values if blocks else _("Allow %(target)s") % values, said, warnings)
