"""Alerts in the admin: where they go, which were raised, and whether they arrived."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.models import Alert, AlertChannel, AlertDelivery
from ratelimits.models.ledger import moment


@admin.register(AlertChannel)
class AlertChannelAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Who is told of an account's alerts."""

    list_display = ["account", "email", "webhook_url", "active"]
    list_filter = ["active"]
    list_select_related = ["account"]
    search_fields = ["account__identifier", "account__name", "email", "webhook_url"]
    autocomplete_fields = ["account"]
    fields = ["account", "email", "webhook_url", "secret", "active"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave the secret out for those who may only look: whoever knows it can sign webhooks."""
        may = self.has_add_permission(request) if obj is None else self.has_change_permission(request, obj)
        return [name for name in super().get_fields(request, obj) if may or name != "secret"]


@admin.register(Alert)
class AlertAdmin(ReadOnlyAdmin):
    """The alerts, each with its deliveries."""

    list_display = ["account", "meter", "reached", "used", "quantity", "basis", "starts", "raised_at"]
    list_filter = ["threshold", "basis", "meter", "raised_at"]
    search_fields = ["account", "rule_name", "meter"]
    fields = [
        *("account", "meter", "reached", "used", "quantity", "basis", "rule_name", "key"),
        *("starts", "ends", "raised_at", "delivered"),
    ]

    @admin.display(description=_("reached"), ordering="threshold")
    def reached(self, alert: Alert) -> str:
        """The threshold."""
        return f"{alert.threshold} %"

    @admin.display(description=_("billing period"), ordering="period")
    def starts(self, alert: Alert) -> str:
        """When the billing period starts."""
        return f"{moment(alert.period * 1_000_000):%Y-%m-%d %H:%M} UTC"

    @admin.display(description=_("its end"))
    def ends(self, alert: Alert) -> str:
        """When the billing period ends."""
        return f"{moment(alert.period_end * 1_000_000):%Y-%m-%d %H:%M} UTC"

    @admin.display(description=_("deliveries"))
    def delivered(self, alert: Alert) -> str:
        """Where it went, and whether it arrived."""
        rows = ((str(one), one.channel or "", one.error) for one in alert.deliveries.select_related("channel"))
        return format_html_join("", "<div>{} {} {}</div>", rows)


@admin.register(AlertDelivery)
class AlertDeliveryAdmin(ReadOnlyAdmin):
    """The deliveries; those that were given up can be made again."""

    list_display = ["alert", "kind", "channel", "state", "attempts", "due_at", "done_at", "error"]
    list_filter = ["state", "kind"]
    list_select_related = ["alert", "channel"]
    search_fields = ["alert__account", "error"]
    actions = ["again"]

    def has_again_permission(self, request: HttpRequest) -> bool:
        """Whoever may change deliveries."""
        return request.user.has_perm("ratelimits.change_alertdelivery")

    @admin.action(description=_("Deliver again what was given up"), permissions=["again"])
    def again(self, request: HttpRequest, queryset: QuerySet[AlertDelivery]) -> None:
        """Have deliveries that failed for good made once more, under the same id."""
        failed = queryset.filter(state=AlertDelivery.State.FAILED)
        count = failed.update(state=AlertDelivery.State.WAITING, attempts=0, due_at=timezone.now())
        done = ngettext("%(n)d delivery is due again.", "%(n)d deliveries are due again.", count)
        self.message_user(request, done % {"n": count}, messages.SUCCESS)
