"""Alerts in the admin: the channels, the alerts that were raised, and the deliveries of alerts to channels."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ratelimits import moments
from ratelimits.admin.inspected import InspectedAdmin
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.suggestions import RowSuggestions
from ratelimits.admin.typed import ChecksIds
from ratelimits.moments import moment
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery
from ratelimits.usage.periods import SECOND


class AlertChannelForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form for a channel. The form of a new channel shows the secret. Later, the form can only replace the secret."""

    class Meta:
        model = AlertChannel
        exclude: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        secret = self.fields.get("secret")
        if secret is None:
            return
        if self.instance.pk is None:
            secret.help_text = _(
                "Webhooks are signed with this secret. Copy it now and give it to the receiver of the webhooks: it is"
                " not shown again."
            )
        else:
            self.initial["secret"] = ""
            secret.required = secret.show_hidden_initial = False
            secret.widget = forms.PasswordInput(attrs={**secret.widget.attrs, "autocomplete": "off"})
            secret.help_text = _(
                "Webhooks are signed with this secret. It is not shown again. To keep the secret, leave this field"
                " empty. To replace the secret, write whsec_ and then 24 to 64 bytes in base64."
            )

    def clean_secret(self) -> str:
        """Return the typed secret. If the field is empty, return the secret that the channel has."""
        return str(self.cleaned_data["secret"] or self.instance.secret)


@admin.register(AlertChannel)
class AlertChannelAdmin(RowSuggestions, ChecksIds):
    """The channels: mail addresses and webhooks that get the alerts of an account."""

    class Media:
        css = {"all": ["ratelimits/lists.css"]}

    list_display = ["account", "email", "webhook_url", "active"]
    list_filter = ["active"]
    list_select_related = ["account"]
    search_fields = ["account__identifier", "account__name", "email", "webhook_url"]
    autocomplete_fields = ["account"]
    form = AlertChannelForm
    fields = ["account", "email", "webhook_url", "secret", "active"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields. Only users who may edit the channel may write its secret."""
        may_edit = self.has_add_permission(request) if obj is None else self.has_change_permission(request, obj)
        return [name for name in super().get_fields(request, obj) if may_edit or name != "secret"]


@admin.register(Alert)
class AlertAdmin(InspectedAdmin, ReadOnlyAdmin):
    """The alerts, each with its deliveries."""

    list_display = ["account", "meter", "reached", "used", "quantity", "basis", "starts", "raised_at"]
    list_filter = ["threshold", "basis", "meter", "raised_at"]
    search_fields = ["account", "rule_name", "meter"]
    fields = [
        *("account", "meter", "reached", "used", "quantity", "basis", "rule_name", "key"),
        *("starts", "ends", "raised_at", "deliveries_as_html"),
    ]

    def inspected(self, row: Alert) -> tuple[str, str]:
        """Return the key and the account of an alert. For an alert about an account: the account's key and ""."""
        return (row.key, row.account) if row.key else (f"account:{row.account}", "")

    @admin.display(description=_("reached"), ordering="threshold")
    def reached(self, alert: Alert) -> str:
        """Return the threshold as text, in percent."""
        return f"{alert.threshold} %"

    @admin.display(description=_("billing period"), ordering="period")
    def starts(self, alert: Alert) -> str:
        """Return when the billing period starts."""
        return f"{moment(alert.period * SECOND):%Y-%m-%d %H:%M} UTC"

    @admin.display(description=_("end of the billing period"))
    def ends(self, alert: Alert) -> str:
        """Return when the billing period ends."""
        return f"{moment(alert.period_end * SECOND):%Y-%m-%d %H:%M} UTC"

    @admin.display(description=_("deliveries"))
    def deliveries_as_html(self, alert: Alert) -> str:
        """Return the alert's deliveries as HTML, each with its state, channel and error."""
        deliveries = alert.deliveries.select_related("channel")
        rows = ((str(delivery), delivery.channel or "", delivery.error) for delivery in deliveries)
        return format_html_join("", "<div>{} {} {}</div>", rows)


@admin.register(AlertDelivery)
class AlertDeliveryAdmin(ReadOnlyAdmin):
    """The deliveries of alerts. An action retries deliveries that were given up."""

    list_display = ["alert", "kind", "channel", "state", "attempts", "due_at", "done_at", "error"]
    list_filter = ["state", "kind"]
    list_select_related = ["alert", "channel"]
    search_fields = ["alert__account", "error"]
    actions = ["again"]

    def has_again_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may retry deliveries. This needs the permission to change deliveries."""
        return request.user.has_perm("ratelimits_usage.change_alertdelivery")

    @admin.action(description=_("Retry the selected deliveries that were given up"), permissions=["again"])
    def again(self, request: HttpRequest, queryset: QuerySet[AlertDelivery]) -> None:
        """Retry deliveries that were given up.

        A delivery keeps its id, so a receiver can recognise an alert that arrives twice.
        """
        failed = queryset.filter(state=AlertDelivery.State.FAILED)
        count = failed.update(state=AlertDelivery.State.WAITING, attempts=0, due_at=moments.now())
        message = ngettext("%(n)d delivery will be retried.", "%(n)d deliveries will be retried.", count)
        self.message_user(request, message % {"n": count}, messages.SUCCESS)
