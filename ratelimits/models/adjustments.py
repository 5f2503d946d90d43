"""Adjustments: units that people add to the usage of a billing period, or subtract from this usage."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models, router, transaction
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.conf.setting_rules import MAX_COST
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models import users
from ratelimits.models.accounts import Account
from ratelimits.models.ledger import moment
from ratelimits.models.periods import freeze_one, timelines
from ratelimits.models.reports import Report, ReportLine
from ratelimits.moments.columns import UTCDateTimeField


def initial_approval() -> str:
    """Return the approval state of a new adjustment: WAITING if `ADJUSTMENT_APPROVAL` is set, otherwise UNASKED."""
    return Adjustment.Approval.WAITING if conf.ADJUSTMENT_APPROVAL else Adjustment.Approval.UNASKED


class Adjustment(models.Model):
    """Units that a person adds to the usage of an account's billing period, and the reason.

    A quantity below 0 subtracts units. Reports leave out an adjustment that waits for approval or was refused.
    """

    class Approval(models.TextChoices):
        """Whether another person must approve the adjustment, and whether that person approved or refused it."""

        UNASKED = "unasked", _("not asked for")
        WAITING = "waiting", _("waiting")
        APPROVED = "approved", _("approved")
        REFUSED = "refused", _("refused")

    #: The approval states of adjustments that reports contain.
    REPORTABLE = (Approval.UNASKED, Approval.APPROVED)

    reference = models.UUIDField(_("reference"), default=uuid.uuid4, unique=True, editable=False)
    account = models.CharField(
        _("account"),
        max_length=LONGEST_NAME,
        blank=True,
        help_text=_("Leave it empty for anonymous usage, which has no account."),
    )
    period_start = UTCDateTimeField(
        _("billing period"),
        help_text=_(
            "The moment at which the billing period starts. If the period is finalised, the adjustment makes a new"
            " version of the period's report."
        ),
    )
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME, default="requests")
    key = models.CharField(
        _("key"), max_length=LONGEST_NAME, blank=True, help_text=_("Leave it empty for the account as a whole.")
    )
    quantity = models.BigIntegerField(_("quantity"), help_text=_("Units to add. A number below 0 subtracts units."))
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
    created_at = UTCDateTimeField(_("created at"), auto_now_add=True)
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
    decided_at = UTCDateTimeField(_("approved or refused at"), null=True, blank=True, editable=False)
    report = models.ForeignKey(
        Report,
        models.PROTECT,
        null=True,
        blank=True,
        editable=False,
        related_name="adjustments",
        verbose_name=_("report"),
        help_text=_("The report version that contains the adjustment; empty if no report contains it yet."),
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
                violation_error_message=_("Write the reason: readers of the report will ask for it."),
            ),
            models.CheckConstraint(
                condition=models.Q(decided_by=None) | ~models.Q(decided_by=models.F("author")),
                name="ratelimits_adjustment_four_eyes",
                violation_error_message=_("An adjustment must be approved by a person other than its author."),
            ),
            models.CheckConstraint(
                condition=models.Q(report=None) | models.Q(approval__in=("unasked", "approved")),
                name="ratelimits_adjustment_approved",
                violation_error_message=_("An adjustment that was not approved cannot be on a report."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.quantity:+,} {self.meter} for {self.account or 'anonymous'}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the adjustment, and freeze the billing period that it is about."""
        using = kwargs.get("using") or router.db_for_write(Adjustment, instance=self)
        with transaction.atomic(using=using):
            start: datetime = Adjustment._meta.get_field("period_start").to_python(self.period_start)
            freeze_one(using, self.account, int(start.timestamp()) * 1_000_000)
            super().save(*args, **kwargs)

    def clean(self) -> None:
        """Raise ValidationError if the quantity, the period or the corrected line is not valid."""
        errors: dict[str, Any] = {}
        if self.quantity == 0:
            errors["quantity"] = _("An adjustment of 0 changes nothing: write how many units.")
        units: Any = self.quantity  # None if the form could not read the typed quantity.
        if units is not None and abs(units) > MAX_COST:
            errors["quantity"] = _("An adjustment can be of at most %(most)s units.") % {"most": f"{MAX_COST:,}"}
        period_start: Any = self.period_start  # None if the form could not read the typed moment.
        if period_start is not None and (error := self._start_error()):
            errors["period_start"] = error
        lines = ReportLine.objects.filter(line_id=self.corrects_line_id, report__account=self.account)
        if self.corrects_line_id and not lines.exists():
            errors["corrects_line_id"] = _("No report of this account has this line.")
        if errors:
            raise ValidationError(errors)

    def _start_error(self) -> Any:
        """Return an error message if no billing period of the account starts at `period_start`, otherwise ""."""
        start = int(self.period_start.timestamp()) * 1_000_000
        timeline = timelines(conf.DATABASE, [self.account])[self.account]
        try:
            period = timeline.at(start)
        except ValueError as error:
            return str(error)
        if not timeline.is_frozen(period) and not Account.objects.filter(identifier=self.account).exists():
            if not self.account:
                return _("No period with anonymous usage starts at this moment.")
            return _(
                "This account has no usage in this period and is not in the table of accounts: check the spelling"
                " of the account."
            )
        if period.start == start:
            return ""
        return _(
            "No billing period of this account starts at this moment. The period that contains this moment starts at"
            " %(start)s %(zone)s."
        ) % {"start": f"{moments.local(moment(period.start)):%Y-%m-%d %H:%M:%S}", "zone": moments.zone_name()}
