"""What the usage endpoint is asked and what it answers."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime, timedelta
from typing import Any

from django.utils.translation import gettext as _
from rest_framework import serializers

from ratelimits.algorithms import calendar
from ratelimits.api.windows import SPANS, PagePosition
from ratelimits.reports.exports import DOWNLOADS, Format
from ratelimits.reports.periods import month_window

#: Longest name that is looked for; one that is longer than the ledger's is there by its digest.
LONGEST_TEXT = 1000
#: Parameters of DRF's own.
_FOREIGN = {"format"}


class LocalDateTimeField(serializers.DateTimeField):
    """A moment, or a local date-time, which stays naive until the time zone is known."""

    def enforce_timezone(self, value: datetime) -> datetime:
        return value


class Query(serializers.Serializer[dict[str, Any]]):
    """The parameters of a question."""

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse a parameter that is not known: a misspelt filter would show more than was asked for."""
        known = self.fields.keys() | _FOREIGN
        unknown = sorted(set(self.initial_data) - known)
        if unknown:
            hint = _("There is no such parameter; known are %(names)s.") % {"names": ", ".join(sorted(self.fields))}
            raise serializers.ValidationError(dict.fromkeys(unknown, hint))
        return attrs


class ReportQuery(Query):
    period = serializers.CharField(max_length=7, help_text="A month such as 2026-10.")
    file = serializers.ChoiceField(choices=sorted(DOWNLOADS), default="csv", help_text="What kind of file.")
    account = serializers.CharField(
        required=False, max_length=LONGEST_TEXT, help_text="Staff may name any; others their own."
    )

    def validate_period(self, month: str) -> str:
        """Refuse what is no month."""
        try:
            month_window(month)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error
        return month

    def validate_file(self, name: str) -> Format:
        """The format; refuse what cannot be written here."""
        if DOWNLOADS[name].missing:
            raise serializers.ValidationError(DOWNLOADS[name].missing)
        return DOWNLOADS[name]


class UsageQuery(Query):
    window = serializers.ChoiceField(choices=list(SPANS), default="day", help_text="What usage is added up by.")
    account = serializers.CharField(
        required=False, max_length=LONGEST_TEXT, help_text="Staff may name any; others their own."
    )
    key = serializers.CharField(
        required=False, max_length=LONGEST_TEXT, help_text="Such as api_key:17 or user:42; default: all."
    )
    meter = serializers.CharField(required=False, max_length=LONGEST_TEXT, help_text="Such as requests; default: all.")
    timezone = serializers.CharField(
        required=False,
        max_length=64,
        help_text="Whose hours and days: an IANA name. Default: the account's; UTC where there are several accounts.",
    )
    page_size = serializers.IntegerField(default=100, min_value=1, max_value=1000)
    cursor = serializers.CharField(required=False, max_length=2000, help_text="From `next` of the page before.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        # "from" is no name that Python takes.
        moment = "A moment such as 2026-11-01T00:00:00Z, or a date-time of the time zone such as 2026-11-01."
        return {
            **super().get_fields(),
            "from": LocalDateTimeField(
                required=False, help_text=f"{moment} Default: the start of the current billing period."
            ),
            "to": LocalDateTimeField(required=False, help_text=f"{moment} Default: now."),
        }

    def validate_timezone(self, name: str) -> str:
        """Refuse what is no time zone."""
        try:
            calendar.zone(name)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error
        return name

    def validate_cursor(self, text: str) -> PagePosition:
        """The place that a cursor names."""
        try:
            window, *texts = json.loads(urlsafe_b64decode(text.encode()))
            place = PagePosition(window, *texts)
        except (ValueError, TypeError, RecursionError) as error:
            raise serializers.ValidationError(_("This is no cursor: take the one in `next`.")) from error
        whole = type(window) is int and 0 <= window < 2**40
        if not whole or not all(isinstance(one, str) and _storable(one) for one in texts):
            raise serializers.ValidationError(_("This is no cursor: take the one in `next`."))
        return place


def _storable(text: str) -> bool:
    """Return whether a database can hold the text: JSON may name half a character, which no encoding has."""
    half = any("\ud800" <= letter <= "\udfff" for letter in text)
    return len(text) <= LONGEST_TEXT and "\0" not in text and not half


def cursor(place: PagePosition) -> str:
    """A place as text that a link can have."""
    return urlsafe_b64encode(json.dumps(place).encode()).decode()


def too_long(window: str) -> serializers.ValidationError:
    """The refusal of a span that would be too much for one question."""
    said = _("At most %(days)s days can be asked for by %(window)s: name a later `from` or an earlier `to`.")
    return serializers.ValidationError({"from": said % {"days": SPANS[window], "window": window}})


def longest(window: str) -> timedelta:
    """The longest span that can be asked for."""
    return timedelta(days=SPANS[window])


class UsageRow(serializers.Serializer[dict[str, Any]]):
    start = serializers.DateTimeField(help_text="Start of the window.")
    end = serializers.DateTimeField(help_text="Its end, which is not part of it.")
    account = serializers.CharField(help_text="Empty: none.")
    key = serializers.CharField()
    meter = serializers.CharField()
    unit = serializers.CharField()
    admitted_requests = serializers.IntegerField()
    admitted_units = serializers.IntegerField()
    denied_requests = serializers.IntegerField()
    denied_units = serializers.IntegerField()
    refunded_units = serializers.IntegerField()


class IncludedUsage(serializers.Serializer[dict[str, Any]]):
    meter = serializers.CharField()
    unit = serializers.CharField()
    used = serializers.IntegerField(help_text="Units admitted less units refunded, as far as the ledger has them.")
    included = serializers.IntegerField(help_text="What the plan includes in each billing period.")
    remaining = serializers.IntegerField(help_text="What is left of it.")
    overage = serializers.IntegerField(help_text="What is used beyond it.")


class LimitStanding(serializers.Serializer[dict[str, Any]]):
    rule = serializers.CharField()
    key = serializers.CharField(help_text="What the rule counts under.")
    meter = serializers.CharField()
    unit = serializers.CharField()
    limit = serializers.IntegerField()
    remaining = serializers.IntegerField(help_text="Permits that could be taken at this moment.")
    reset_after = serializers.FloatField(help_text="Seconds until the limit is as if never used.")


class QuotaStanding(serializers.Serializer[dict[str, Any]]):
    period_start = serializers.DateTimeField()
    period_end = serializers.DateTimeField()
    plan = serializers.CharField(help_text="Empty: none.")
    included = IncludedUsage(many=True)
    limits = LimitStanding(many=True, allow_null=True, help_text="Of the rules that bill; null: cannot be had now.")


class UsagePage(serializers.Serializer[dict[str, Any]]):
    account = serializers.CharField(allow_null=True, help_text="null: all accounts.")
    window = serializers.ChoiceField(choices=list(SPANS))
    timezone = serializers.CharField()
    complete_until = serializers.DateTimeField(
        allow_null=True, help_text="Whatever was used before is in these numbers; null: not known yet."
    )
    quota = QuotaStanding(allow_null=True, help_text="Of one account, on the first page.")
    next = serializers.URLField(allow_null=True, help_text="The next page.")
    results = UsageRow(many=True, help_text="By window, account, key and meter; windows without usage are left out.")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {
            **super().get_fields(),
            "from": serializers.DateTimeField(help_text="As asked for, rounded down to the start of a window."),
            "to": serializers.DateTimeField(help_text="As asked for, rounded up to the end of a window."),
        }
