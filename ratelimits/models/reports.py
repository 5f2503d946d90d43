"""Reports: finalised statements of billing periods, their lines, and what people adjusted.

Rows of Report and ReportLine are written once and never changed; a correction is a further version. Moments are
microseconds since 1970 UTC unless they say otherwise; intervals are half-open.
"""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.conf import conf
from ratelimits.engine import calendar
from ratelimits.models import users
from ratelimits.models.accounts import Account
from ratelimits.models.ledger import moment


def _day(microseconds: int) -> str:
    """Return the date of a moment in µs since 1970 UTC; a row that was tampered with may have one of no calendar."""
    try:
        return f"{moment(microseconds):%Y-%m-%d}"
    except OverflowError:
        return f"{microseconds} µs"


class PeriodUsage(models.Model):
    """Running totals of an account's usage under one rule in one billing period, as far as a shard was tallied.

    Derived from ledger lines, batch by batch. `covered` is the position of the shard's chain up to which reports have
    this usage; empty while the period is open.
    """

    account = models.CharField(_("account"), max_length=255, blank=True)
    period = models.BigIntegerField(_("billing period (s)"))
    #: Empty in rows of before it was kept.
    period_end = models.BigIntegerField(_("end of the period (s)"), null=True, blank=True)
    meter = models.CharField(_("meter"), max_length=255)
    rule = models.BigIntegerField(_("rule"))
    shard = models.PositiveIntegerField(_("shard"))
    admitted_requests = models.BigIntegerField(_("admitted requests"), default=0)
    admitted_units = models.BigIntegerField(_("admitted units"), default=0)
    denied_requests = models.BigIntegerField(_("denied requests"), default=0)
    refunded_units = models.BigIntegerField(_("refunded units"), default=0)
    position = models.BigIntegerField(_("newest batch"))
    covered = models.BigIntegerField(_("covered up to"), null=True, blank=True)

    class Meta:
        verbose_name = _("usage of a period")
        verbose_name_plural = _("usage by period")
        constraints = [
            models.UniqueConstraint(
                fields=["account", "period", "meter", "rule", "shard"], name="ratelimits_period_usage"
            )
        ]
        indexes = [models.Index(fields=["period"], name="ratelimits_period_usage_open")]

    def __str__(self) -> str:
        return f"{self.account} {self.meter} {_day(self.period * 1_000_000)}"


class Report(models.Model):
    """One version of the finalised statement of an account's billing period."""

    account = models.CharField(_("account"), max_length=255, blank=True)
    period_start = models.BigIntegerField(_("period start (µs)"))
    period_end = models.BigIntegerField(_("period end (µs)"))
    timezone = models.CharField(_("time zone"), max_length=64)
    version = models.PositiveIntegerField(_("version"), default=1)
    plan = models.CharField(_("plan"), max_length=80, blank=True)
    included: Any = models.JSONField(_("included quantities"), default=dict)
    #: What its lines cost: the account's name, and by the billing period (s, as text) of its usage the plan's prices.
    prices: Any = models.JSONField(_("prices"), default=dict, blank=True)
    #: What they come to: by such a period the meters' totals before and after this version, and the amounts.
    amounts: Any = models.JSONField(_("amounts"), default=dict, blank=True)
    #: By the billing period (s, as text) of its usage: shard (as text) to the position that was taken before.
    since: Any = models.JSONField(_("from positions"), default=dict)
    #: Shard to the position of its chain that the usage was taken up to.
    chain: Any = models.JSONField(_("to positions"), default=dict)
    chain_head = models.CharField(_("head of the chain"), max_length=64)
    gaps = models.TextField(_("durability gaps"), blank=True)
    line_count = models.PositiveIntegerField(_("lines"), default=0)
    previous_digest = models.CharField(_("digest of the version before"), max_length=64, blank=True)
    digest = models.CharField(_("digest"), max_length=64)
    signature = models.CharField(_("signature"), max_length=64, blank=True)
    finalised_at = models.DateTimeField(_("finalised at"), auto_now_add=True)

    class Meta:
        verbose_name = _("report")
        verbose_name_plural = _("reports")
        ordering = ["-period_start", "account", "-version"]
        constraints = [
            models.UniqueConstraint(fields=["account", "period_start", "version"], name="ratelimits_report_version")
        ]
        indexes = [models.Index(fields=["-period_start", "account", "-version"], name="ratelimits_report_list")]

    def __str__(self) -> str:
        return f"{self.account or 'anonymous'} {_day(self.period_start)} v{self.version}"


class ReportLine(models.Model):
    """A line, of the version that brought it in; later versions of the report have it too."""

    report = models.ForeignKey(Report, models.PROTECT, related_name="lines", verbose_name=_("report"))
    number = models.PositiveIntegerField(_("number"))
    line_id = models.CharField(_("line"), max_length=32, db_index=True)
    key = models.CharField(_("key"), max_length=255)
    meter = models.CharField(_("meter"), max_length=255)
    unit = models.CharField(_("unit"), max_length=255)
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
    durability_gap = models.TextField(_("durability gap"), blank=True)
    # What it was made from, so that it can be made again.
    usage_period = models.BigIntegerField(_("period of its usage (s)"))
    rule_id = models.BigIntegerField(_("rule's row"), default=0)

    class Meta:
        verbose_name = _("report line")
        verbose_name_plural = _("report lines")
        constraints = [models.UniqueConstraint(fields=["report", "number"], name="ratelimits_report_line")]

    def __str__(self) -> str:
        return self.line_id


def initial_approval() -> str:
    """Return whether a new adjustment waits for approval, as RATELIMITS["ADJUSTMENT_APPROVAL"] says now."""
    return Adjustment.Approval.WAITING if conf.ADJUSTMENT_APPROVAL else Adjustment.Approval.UNASKED


class Adjustment(models.Model):
    """Units that a person adds to an account's billing period, or (below zero) takes off it, and why.

    It counts unless it waits for the approval of another person, or was refused.
    """

    class Approval(models.TextChoices):
        """Whether somebody else has to approve it, and did."""

        UNASKED = "unasked", _("not asked for")
        WAITING = "waiting", _("waiting")
        APPROVED = "approved", _("approved")
        REFUSED = "refused", _("refused")

    #: It counts, as far as approval goes.
    COUNTS = (Approval.UNASKED, Approval.APPROVED)

    reference = models.UUIDField(_("reference"), default=uuid.uuid4, unique=True, editable=False)
    account = models.CharField(
        _("account"), max_length=255, blank=True, help_text=_("Empty: anonymous usage, of no account.")
    )
    period_start = models.DateTimeField(
        _("billing period"), help_text=_("Its start. In a finalised period it becomes a new version of the report.")
    )
    meter = models.CharField(_("meter"), max_length=255, default="requests")
    key = models.CharField(_("key"), max_length=255, blank=True, help_text=_("Empty: of the account as a whole."))
    quantity = models.BigIntegerField(_("quantity"), help_text=_("Units; below zero they are taken off."))
    corrects_line_id = models.CharField(_("corrects line"), max_length=32, blank=True)
    reason = models.CharField(_("reason"), max_length=300)
    author = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        users.protect,
        related_name="+",
        verbose_name=_("author"),
        editable=False,
        db_constraint=False,
    )
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)
    approval = models.CharField(
        _("approval"), max_length=10, choices=Approval.choices, default=initial_approval, editable=False
    )
    decided_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        users.protect,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("approved or refused by"),
        editable=False,
        db_constraint=False,
    )
    decided_at = models.DateTimeField(_("approved or refused at"), null=True, blank=True, editable=False)
    report = models.ForeignKey(
        Report,
        models.PROTECT,
        null=True,
        blank=True,
        editable=False,
        related_name="adjustments",
        verbose_name=_("report"),
        help_text=_("The version that has it; empty: not finalised yet."),
    )

    class Meta:
        verbose_name = _("adjustment")
        verbose_name_plural = _("adjustments")
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(
                condition=~models.Q(quantity=0),
                name="ratelimits_adjustment_quantity",
                violation_error_message=_("An adjustment of 0 changes nothing: write how many units."),
            ),
            models.CheckConstraint(
                condition=~models.Q(reason=""),
                name="ratelimits_adjustment_reason",
                violation_error_message=_("Say why: whoever reads the report will ask."),
            ),
            models.CheckConstraint(
                condition=models.Q(decided_by=None) | ~models.Q(decided_by=models.F("author")),
                name="ratelimits_adjustment_four_eyes",
                violation_error_message=_("An adjustment is approved by another person than its author."),
            ),
            models.CheckConstraint(
                condition=models.Q(report=None) | models.Q(approval__in=("unasked", "approved")),
                name="ratelimits_adjustment_approved",
                violation_error_message=_("An adjustment that was not approved is on no report."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.quantity:+,} {self.meter} for {self.account or 'anonymous'}"

    def clean(self) -> None:
        """Refuse what changes nothing, and what no report could have."""
        errors: dict[str, Any] = {}
        if self.quantity == 0:
            errors["quantity"] = _("An adjustment of 0 changes nothing: write how many units.")
        typed: Any = self.period_start  # None where the form could not read it
        if typed is not None and (wrong := self._wrong_start()):
            errors["period_start"] = wrong
        lines = ReportLine.objects.filter(line_id=self.corrects_line_id, report__account=self.account)
        if self.corrects_line_id and not lines.exists():
            errors["corrects_line_id"] = _("No report of this account has this line.")
        if errors:
            raise ValidationError(errors)

    def _wrong_start(self) -> Any:
        """Why no billing period of the account starts then, as a text; empty if one does."""
        start = int(self.period_start.timestamp()) * 1_000_000
        if (
            Report.objects.filter(account=self.account, period_start=start).exists()
            or PeriodUsage.objects.filter(account=self.account, period=start // 1_000_000).exists()
        ):
            return ""
        if not self.account:
            return _("There is no usage without an account in a period that starts then.")
        payer = Account.objects.filter(identifier=self.account).first()
        if payer is None:
            return _("Nothing is known of this account in this period: is its identifier spelt right?")
        around = calendar.boundaries("month", payer.timezone, payer.billing_anchor or None, start)[1]
        if around == start:
            return ""
        return _("No billing period of this account starts then; the one around it starts at %(start)s.") % {
            "start": f"{moment(around):%Y-%m-%d %H:%M:%S} UTC"
        }
