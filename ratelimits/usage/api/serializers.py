"""Serializers for the parameters of the API, and for the responses of `/usage/`."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _
from rest_framework import serializers

from ratelimits.algorithms import calendar
from ratelimits.usage.api.windows import MAX_DAYS, PagePosition
from ratelimits.usage.ledger.bills import bills

#: Maximum number of characters of a name in a query. (The ledger has shorter names instead of very long ones.)
MAX_TEXT = 1000
#: Query parameters that Django REST framework itself uses.
_FRAMEWORK_PARAMETERS = {"format"}


class LocalDateTimeField(serializers.DateTimeField):
    """A field for a moment, or for a local date-time without a UTC offset.

    The field adds no time zone to a local date-time, because another parameter can contain the time zone.
    """

    def enforce_timezone(self, value: datetime) -> datetime:
        return value


class Query(serializers.Serializer[dict[str, Any]]):
    """Base class of the serializers for query parameters."""

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Raise ValidationError for an unknown parameter. Without this, a misspelt filter would filter nothing."""
        known = self.fields.keys() | _FRAMEWORK_PARAMETERS
        unknown = sorted(set(self.initial_data) - known)
        if unknown:
            hint = _("There is no such parameter. The parameters are: %(names)s.") % {
                "names": ", ".join(sorted(self.fields))
            }
            raise serializers.ValidationError(dict.fromkeys(unknown, hint))
        return attrs


class UsageQuery(Query):
    window = serializers.ChoiceField(
        choices=list(MAX_DAYS), default="day", help_text="Length of the windows: each row has the sum of one window."
    )
    account = serializers.CharField(
        required=False,
        max_length=MAX_TEXT,
        help_text="Identifier of an account. Staff can name any account, or the token of a customer. Customers can"
        " name only their own account.",
    )
    key = serializers.CharField(
        required=False, max_length=MAX_TEXT, help_text="A key such as api_key:17 or user:42. Default: all keys."
    )
    meter = serializers.CharField(
        required=False, max_length=MAX_TEXT, help_text="A meter such as requests. Default: all meters."
    )
    timezone = serializers.CharField(
        required=False,
        max_length=64,
        help_text="IANA time zone of hours and days. Default: the account's time zone, or UTC without an account.",
    )
    page_size = serializers.IntegerField(default=100, min_value=1, max_value=1000)
    cursor = serializers.CharField(
        required=False, max_length=2000, help_text="The value of `cursor` in the link `next` of the previous page."
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        # `from` is a Python keyword, so it cannot be the name of an attribute.
        moment = "A moment such as 2026-11-01T00:00:00Z, or a local date or date-time such as 2026-11-01."
        return {
            **super().get_fields(),
            "from": LocalDateTimeField(
                required=False, help_text=f"{moment} Default: the start of the current billing period."
            ),
            "to": LocalDateTimeField(required=False, help_text=f"{moment} Default: now."),
        }

    def validate_timezone(self, name: str) -> str:
        """Return the time zone. Raise ValidationError if the text is not an IANA time zone."""
        try:
            calendar.zone(name)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error
        return name

    def validate_cursor(self, text: str) -> PagePosition:
        """Return the position that a cursor encodes. Raise ValidationError if the text is not a cursor."""
        try:
            window, *texts = json.loads(urlsafe_b64decode(text.encode()))
            position = PagePosition(window, *texts)
        except (ValueError, TypeError, RecursionError) as error:
            raise serializers.ValidationError(_("This is not a cursor: use the link in `next`.")) from error
        valid = type(window) is int and 0 <= window < 2**40  # a moment in seconds that a database can store
        if not valid or not all(isinstance(name, str) and _storable(name) for name in texts):
            raise serializers.ValidationError(_("This is not a cursor: use the link in `next`."))
        return position


def _storable(text: str) -> bool:
    """Return whether a database can store the text. JSON can contain surrogates, and they cannot be stored."""
    has_surrogate = any("\ud800" <= letter <= "\udfff" for letter in text)
    return len(text) <= MAX_TEXT and "\0" not in text and not has_surrogate


def cursor(position: PagePosition) -> str:
    """Return the cursor that encodes a position."""
    return urlsafe_b64encode(json.dumps(position).encode()).decode()


def span_error(window: str) -> serializers.ValidationError:
    """Return the error for a span of time that is too long for windows of this length."""
    message = _("With window=%(window)s the span can be at most %(days)s days: give a later `from` or an earlier `to`.")
    return serializers.ValidationError({"from": message % {"days": MAX_DAYS[window], "window": window}})


def max_span(window: str) -> timedelta:
    """Return the longest span of time for windows of this length."""
    return timedelta(days=MAX_DAYS[window])


class UsageRow(serializers.Serializer[dict[str, Any]]):
    start = serializers.DateTimeField(help_text="Start of the window.")
    end = serializers.DateTimeField(help_text="End of the window. This moment itself is in the next window.")
    account = serializers.CharField(help_text="Empty for anonymous usage.")
    key = serializers.CharField(help_text="Such as api_key:17 or user:42.")
    meter = serializers.CharField()
    unit = serializers.CharField(help_text="Unit of the meter, such as MB.")
    admitted_requests = serializers.IntegerField()
    admitted_units = serializers.IntegerField(help_text="Units that the admitted requests took.")
    denied_requests = serializers.IntegerField()
    denied_units = serializers.IntegerField(help_text="Units that the refused requests would have taken.")
    refunded_units = serializers.IntegerField(help_text="Units that were given back.")


class IncludedUsage(serializers.Serializer[dict[str, Any]]):
    meter = serializers.CharField()
    unit = serializers.CharField()
    used = serializers.IntegerField(help_text="Admitted units minus refunded units, as far as the ledger has them.")
    included = serializers.IntegerField(help_text="Units that the plan includes in each billing period.")
    remaining = serializers.IntegerField(help_text="Included units that are not used yet.")
    overage = serializers.IntegerField(help_text="Used units above the included quantity.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        found = super().get_fields()
        for name in ("included", "remaining", "overage"):
            found[name].allow_null = bills.included is None  # Then nobody knows what the plan includes.
        return found


class LimitStanding(serializers.Serializer[dict[str, Any]]):
    rule = serializers.CharField()
    key = serializers.CharField(help_text="The key for which the rule counts requests.")
    meter = serializers.CharField()
    unit = serializers.CharField()
    limit = serializers.IntegerField(help_text="Maximum number of permits.")
    remaining = serializers.IntegerField(help_text="Permits that are available now.")
    reset_after = serializers.FloatField(help_text="Seconds until all permits are available again.")


class QuotaStanding(serializers.Serializer[dict[str, Any]]):
    period_start = serializers.DateTimeField()
    period_end = serializers.DateTimeField()
    plan = serializers.CharField(help_text="Empty if the account has no plan.")
    included = IncludedUsage(many=True)
    limits = LimitStanding(
        many=True,
        allow_null=True,
        help_text="The limits of the rules that bill usage; null if Redis does not answer.",
    )


class UsagePage(serializers.Serializer[dict[str, Any]]):
    account = serializers.CharField(allow_null=True, help_text="null if the page shows all accounts.")
    window = serializers.ChoiceField(choices=list(MAX_DAYS))
    timezone = serializers.CharField()
    complete_until = serializers.DateTimeField(
        allow_null=True,
        help_text="These numbers contain all usage before this moment. null if no such moment is known yet.",
    )
    quota = QuotaStanding(
        allow_null=True,
        help_text="The account's quota; null if the page shows all accounts, and on every page after the first.",
    )
    next = serializers.URLField(allow_null=True, help_text="Link to the next page; null on the last page.")
    results = UsageRow(
        many=True, help_text="Rows in the order of window, account, key and meter. A window without usage has no row."
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {
            **super().get_fields(),
            "from": serializers.DateTimeField(help_text="The requested `from`, rounded down to the start of a window."),
            "to": serializers.DateTimeField(help_text="The requested `to`, rounded up to the end of a window."),
        }
