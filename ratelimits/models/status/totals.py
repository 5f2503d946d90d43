"""Totals of ledger lines in spans of time. Charts show totals by rule; lists of the busiest keys show totals by key.

A span is a quarter of an hour, an hour, six hours, a day in UTC, or five days. `usage/span_totals.py` adds the lines of
new batches to the totals, and can calculate all totals again. Totals of old spans, which no page shows any more, are
deleted.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.moments import moment

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
