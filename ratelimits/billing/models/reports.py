"""Reports: finalised statements of billing periods, and their lines.

Rows of `Report` and `ReportLine` are written once and never changed. A correction is a new version of the report.
Moments are in microseconds since 1970 UTC where no other unit is given. The end of a period is not part of the period.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.billing_periods import period_name
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.customers import Customer
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt


class Report(models.Model):
    """One version of the finalised statement of a customer's billing period.

    It has the usage of all account texts while they named the customer. `account` is the customer's text at the time
    when the version was written.

    In the comments on JSON columns, "by period" means: by the start of a billing period, in seconds since 1970 UTC, as
    text. "By shard" means: by the shard, as text.
    """

    #: Who owes the report. `customer_id` is the customer's token.
    customer = models.ForeignKey(
        Customer, models.PROTECT, to_field="token", related_name="+", db_index=False, verbose_name=_("customer")
    )
    account = models.CharField(_("account"), max_length=LONGEST_NAME, blank=True)
    period_start = models.BigIntegerField(_("period start (µs)"))
    period_end = models.BigIntegerField(_("period end (µs)"))
    timezone = models.CharField(_("time zone"), max_length=64)
    #: The month of the period's last moment in the time zone of the period, such as "2026-11". It is stored with the
    #: first version, and never changes. An account can have two periods of a month, so it never identifies a period.
    label = models.CharField(_("month"), max_length=7)
    version = models.PositiveIntegerField(_("version"), default=1)
    plan = models.CharField(_("plan"), max_length=80, blank=True)
    included: Any = models.JSONField(_("included quantities"), default=dict)
    #: The account's name, and the plan's prices by period (see `billing/reports/amounts.py`).
    prices: Any = models.JSONField(_("prices"), default=dict, blank=True)
    #: "periods" has, by period: each meter's overage before this version and after it, and the amount that this version
    #: adds. "total" has the total amounts of the report, by currency.
    amounts: Any = models.JSONField(_("amounts"), default=dict, blank=True)
    #: By period and shard: the position in the shard's chain at which the usage of earlier versions ends.
    since: Any = models.JSONField(_("from positions"), default=dict)
    #: By shard: the position in the shard's chain at which the usage of this version ends.
    chain: Any = models.JSONField(_("to positions"), default=dict)
    chain_head = models.CharField(_("head of the chain"), max_length=64)
    gaps = models.TextField(_("durability gaps"), blank=True)
    #: The version of the columns in the report's digest and exports (see `billing/reports/rows.py`).
    columns_version = models.PositiveSmallIntegerField(_("version of the columns"), default=1, db_default=1)
    line_count = models.PositiveIntegerField(_("lines"), default=0)
    previous_digest = models.CharField(_("digest of the version before"), max_length=64, blank=True)
    #: The digest of the report includes this salt. An erasure gives the report another one (see
    #: usage/models/erased.py).
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, editable=False)
    digest = models.CharField(_("digest"), max_length=64)
    signature = models.CharField(_("signature"), max_length=64, blank=True)
    finalised_at = UTCDateTimeField(_("finalised at"), auto_now_add=True)

    class Meta:
        verbose_name = _("report")
        verbose_name_plural = _("reports")
        default_permissions = ("view",)
        ordering = ["-period_start", "account", "-version"]
        permissions = [("finalise", _("Can finalise periods, and close one by force"))]
        constraints = [
            models.UniqueConstraint(fields=["customer", "period_start", "version"], name="ratelimits_report_version")
        ]
        indexes = [
            models.Index(fields=["-period_start", "account", "-version"], name="ratelimits_report_list"),
            models.Index(fields=["label", "account"], name="ratelimits_report_label"),
            models.Index(fields=["finalised_at"], name="ratelimits_report_made"),
        ]

    def __str__(self) -> str:
        return f"{self.account or 'anonymous'} {self.period_name()} v{self.version}"

    def period_name(self) -> str:
        """Return the name of the report's period for people, such as "2026-11"."""
        try:
            return period_name(self.label, self.period_start, self.timezone)
        except (OverflowError, OSError, ValueError):
            return f"{self.label} (from {self.period_start} µs)"


class ReportLine(models.Model):
    """A line of a report. Its row belongs to the version that added the line; later versions contain the line too."""

    report = models.ForeignKey(Report, models.PROTECT, related_name="lines", verbose_name=_("report"))
    number = models.PositiveIntegerField(_("number"))
    line_id = models.CharField(_("line"), max_length=32, db_index=True)
    key = models.CharField(_("key"), max_length=LONGEST_NAME)
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    unit = models.CharField(_("unit"), max_length=LONGEST_NAME)
    charge_category = models.CharField(_("category"), max_length=16)
    charge_class = models.CharField(_("class"), max_length=16, blank=True)
    corrects_line_id = models.CharField(_("corrects line"), max_length=32, blank=True)
    charge_period_start = models.BigIntegerField(_("used from (µs)"))
    charge_period_end = models.BigIntegerField(_("used until (µs)"))
    consumed_quantity = models.BigIntegerField(_("consumed"))
    included_quantity = models.BigIntegerField(_("included"))
    overage_quantity = models.BigIntegerField(_("overage"))
    refunded_quantity = models.BigIntegerField(_("refunded"))
    admitted_count = models.BigIntegerField(_("admitted"))
    denied_count = models.BigIntegerField(_("denied"))
    unknown_count = models.BigIntegerField(_("unknown"), default=0)
    limit = models.CharField(_("limit"), max_length=40, blank=True)
    rule = models.CharField(_("rule"), max_length=40, blank=True)
    rule_version = models.BigIntegerField(_("rule version"), default=0)
    plan = models.CharField(_("plan"), max_length=80, blank=True)
    batch_range = models.CharField(_("batches"), max_length=80, blank=True)
    # These two columns say from which usage the line was made. Verification needs them to calculate the line again.
    usage_period = models.BigIntegerField(_("period of its usage (start, in s)"))
    rule_id = models.BigIntegerField(_("id of the rule"), default=0)

    class Meta:
        verbose_name = _("report line")
        verbose_name_plural = _("report lines")
        default_permissions = ("view",)
        constraints = [models.UniqueConstraint(fields=["report", "number"], name="ratelimits_report_line")]

    def __str__(self) -> str:
        return self.line_id


def reported_until(using: str, customer: Customer) -> int | None:
    """Return the end of a customer's newest report, in s since 1970 UTC; None without a report."""
    newest = Report.objects.using(using).filter(customer=customer).aggregate(newest=models.Max("period_end"))["newest"]
    return None if newest is None else int(newest) // MICROSECONDS


def chains(using: str) -> Iterator[Mapping[str, int]]:
    """Yield for each report of a database the position up to which it contains usage, by shard."""
    return Report.objects.using(using).order_by().values_list("chain", flat=True).iterator()
