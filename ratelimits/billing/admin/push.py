"""The billing systems and the deliveries to them in the admin, read-only."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.billing.models import PushDelivery, PushReceiver


@admin.register(PushReceiver)
class PushReceiverAdmin(ReadOnlyAdmin):
    """The billing systems. Each row says how the last request to one billing system ended."""

    list_display = ["name", "answered_at", "paused_until", "failures", "error"]
    fields = ["name", "answered_at", "paused_until", "failures", "error"]


@admin.register(PushDelivery)
class PushDeliveryAdmin(ReadOnlyAdmin):
    """The deliveries. If a person must decide about a delivery, the person uses `ratelimits_push --settle`."""

    list_display = ["line_id", "receiver", "on_report", "meter", "overage", "customer", "state", "settled_at", "note"]
    list_filter = ["state", "receiver"]
    list_select_related = ["report", "receiver"]
    search_fields = ["=line_id", "=customer", "=report__account"]
    fields = [
        *("receiver", "on_report", "line_id", "customer", "meter", "overage", "event", "happened_at"),
        *("state", "note", "settled_at", "attempts", "due_at", "unsure_since"),
    ]

    @admin.display(description=_("report"))
    def on_report(self, delivery: PushDelivery) -> str:
        """Return the version of the report that added the line."""
        return str(delivery.report)
