"""Totals of ledger lines, in billing periods and in spans of time.

Reports are made from the totals of billing periods. Charts show totals of spans by rule; lists of the busiest keys show
totals of spans by key.

A span is a quarter of an hour, an hour, six hours, a day in UTC, or five days. `usage/ledger/span_totals.py` adds the
lines of new batches to the totals, and can calculate all totals again. Totals of old spans, which no page shows any
more, are deleted.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.customers import Customer
from ratelimits.moments import moment
from ratelimits.usage.models.sums import MAX_TOTAL

#: Lengths of spans in seconds. The totals of rules have only spans of a quarter of an hour or a day.
QUARTER, HOUR, DAY = 900, 3_600, 86_400
#: With these longer spans, the status page reads fewer totals of keys for 24 hours or 30 days.
SIX_HOURS, FIVE_DAYS = 6 * HOUR, 5 * DAY
#: The columns of a ledger line that are added up.
SUMS = ("admitted_requests", "denied_requests", "shadow_requests")


def newest_days(now: float, count: int) -> list[int]:
    """Return the starts of the newest `count` days in UTC, today first. Moments are in seconds since 1970 UTC."""
    today = int(now) // DAY * DAY
    return [today - DAY * number for number in range(count)]


class SpanTotal(models.Model):
    """Base class with the columns for a span, a rule, a meter and the totals. A start is in s since 1970 UTC."""

    span = models.PositiveIntegerField(_("length (s)"))
    start = models.BigIntegerField(_("start (s)"))
    rule = models.BigIntegerField(
        _("rule"), help_text=_("The rule that bills this usage, or that refused the requests; 0 if there is none.")
    )
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    admitted_requests = models.BigIntegerField(_("admitted requests"))
    denied_requests = models.BigIntegerField(_("denied requests"))
    shadow_requests = models.BigIntegerField(_("shadow-refused requests"))

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.rule} {self.meter} {moment(self.start * 1_000_000):%Y-%m-%d %H:%M}"


class RuleTotal(SpanTotal):
    """Totals of one rule and meter in a quarter of an hour or in a day."""

    class Meta:
        verbose_name = _("total of a rule")
        verbose_name_plural = _("totals of rules")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["span", "start", "rule", "meter"], name="ratelimits_rule_total")]


class KeyTotal(SpanTotal):
    """Totals of one key, rule and meter in a quarter of an hour, an hour, six hours, a day or five days.

    For a quarter of an hour, only refusals are added up.
    """

    account = models.CharField(_("account"), max_length=LONGEST_NAME, blank=True)
    key = models.CharField(_("key"), max_length=LONGEST_NAME)

    class Meta:
        verbose_name = _("total of a key")
        verbose_name_plural = _("totals of keys")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["span", "start", "account", "key", "rule", "meter"], name="ratelimits_key_total"
            )
        ]


def _day(microseconds: int) -> str:
    """Return the date of a moment in µs since 1970 UTC. Return the number itself if it is outside of the calendar."""
    try:
        return f"{moment(microseconds):%Y-%m-%d}"
    except OverflowError:
        return f"{microseconds} µs"


#: The counters of `PeriodUsage`. Each stays at MAX_TOTAL when it reaches it.
_COUNTERS = ("admitted_requests", "admitted_units", "denied_requests", "shadow_requests", "refunded_units")
_IS_FULL = reduce(or_, (models.Q(**{name: MAX_TOTAL}) for name in _COUNTERS))


class PeriodUsage(models.Model):
    """The usage of an account under one rule in one billing period, added up from ledger lines of one shard.

    If the account's text was the name of two customers in the period, each of them has rows of its own.

    `usage/ledger/tally.py` adds the lines, batch by batch. `position` is the position of the newest batch that was
    added here. `covered` is the position up to which reports contain the usage. It is empty while the period has no
    final report.
    """

    account = models.CharField(_("account"), max_length=LONGEST_NAME, blank=True)
    period = models.BigIntegerField(_("billing period (start, in s)"))
    period_end = models.BigIntegerField(_("end of the period (in s)"))
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    rule = models.BigIntegerField(_("rule"))
    shard = models.PositiveIntegerField(_("shard"))
    customer = models.ForeignKey(Customer, models.PROTECT, related_name="+", verbose_name=_("customer"))
    admitted_requests = models.BigIntegerField(_("admitted requests"), default=0)
    admitted_units = models.BigIntegerField(_("admitted units"), default=0)
    denied_requests = models.BigIntegerField(_("denied requests"), default=0)
    #: Empty in rows that are older than this column.
    shadow_requests = models.BigIntegerField(_("shadow-refused requests"), null=True, blank=True)
    refunded_units = models.BigIntegerField(_("refunded units"), default=0)
    position = models.BigIntegerField(_("newest batch"))
    covered = models.BigIntegerField(_("covered up to"), null=True, blank=True)

    class Meta:
        verbose_name = _("usage of a period")
        verbose_name_plural = _("usage by period")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(
                fields=["account", "period", "meter", "rule", "shard", "customer"], name="ratelimits_period_usage"
            )
        ]
        indexes = [
            models.Index(fields=["period"], name="ratelimits_period_usage_open"),
            # The few rows that are full. The condition must be that of `full`, so that the database uses the index.
            models.Index(fields=["account"], name="ratelimits_period_usage_full", condition=_IS_FULL),
        ]

    def __str__(self) -> str:
        return f"{self.account} {self.meter} {_day(self.period * 1_000_000)}"

    @property
    def is_full(self) -> bool:
        """Return whether a counter has reached the largest number. Its true value is then this number or more."""
        return any((getattr(self, name) or 0) >= MAX_TOTAL for name in _COUNTERS)

    @classmethod
    def full(cls, using: str) -> models.QuerySet[PeriodUsage]:
        """Return the totals that are full (see `is_full`)."""
        return cls.objects.using(using).filter(_IS_FULL)
