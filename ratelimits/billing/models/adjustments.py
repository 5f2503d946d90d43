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
from ratelimits.billing.models.reports import Report, ReportLine
from ratelimits.conf import conf
from ratelimits.conf.setting_rules import MAX_COST
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models import users
from ratelimits.models.accounts import Account
from ratelimits.models.accounts.named import NamedCustomer, named, named_now
from ratelimits.models.customers import Customer, customer_at, is_waiting, make_missing, names_of
from ratelimits.models.periods import FrozenPeriod, freeze_one, timelines_of
from ratelimits.moments import moment
from ratelimits.moments.columns import UTCDateTimeField
from ratelimits.salts import SALT_BYTES, new_salt


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
    #: Whose billing period is adjusted. `save` finds the customer, unless the caller has chosen one.
    customer = models.ForeignKey(
        Customer, models.PROTECT, related_name="+", verbose_name=_("customer"), blank=True, editable=False
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
    corrects_line_id = models.CharField(
        _("corrects line"),
        max_length=32,
        blank=True,
        help_text=_(
            "The line_id of a line of the report. Leave it empty if the adjustment is about the period as a whole."
        ),
    )
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

    #: The digest of this row in a manifest includes this salt. An erasure gives the row another one
    #: (usage/models/erased.py).
    salt = models.CharField(_("salt"), max_length=2 * SALT_BYTES, default=new_salt, editable=False)

    class Meta:
        verbose_name = _("adjustment")
        verbose_name_plural = _("adjustments")
        default_permissions = ("add", "change", "view")
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
            pk = self.named_customer(using).pk
            if pk is None:
                make_missing(using, [self.account])
                pk = self.named_customer(using).pk
            assert pk is not None
            self.customer_id = pk
            freeze_one(using, pk, self._start())
            super().save(*args, **kwargs)

    def _start(self) -> int:
        """Return `period_start` in µs since 1970 UTC."""
        start: datetime = Adjustment._meta.get_field("period_start").to_python(self.period_start)
        return int(start.timestamp()) * 1_000_000

    def named_customer(self, using: str) -> NamedCustomer:
        """Return the customer whose billing period is adjusted.

        This is the customer whom the account text named at `period_start`. If that customer never used anything, and
        has lost the text, it is the text's newest customer with a used period that starts then. If there is none, it is
        the customer whom the text names now.
        """
        chosen: int | None = self.customer_id
        if chosen is not None:
            return named(using, [chosen])[0]
        names, start = names_of(using, [self.account]).get(self.account, ()), self._start()
        periods = FrozenPeriod.objects.using(using).filter(customer__in=[name.customer for name in names])
        starts: dict[int, set[int]] = {}
        for pk, used_from in periods.values_list("customer", "start"):
            starts.setdefault(pk, set()).add(used_from)
        owner = customer_at(names, start // 1_000_000)
        if owner not in starts and names and owner != names[-1].customer:
            owner = next((name.customer for name in reversed(names) if start in starts.get(name.customer, ())), None)
        return named_now(using, [self.account])[self.account] if owner is None else named(using, [owner])[0]

    def clean(self) -> None:
        """Raise ValidationError if the quantity, the period or the corrected line is not valid."""
        errors: dict[str, Any] = {}
        if is_waiting(self.account):  # A link has chosen the customer by its token.
            customer = named_now(conf.DATABASE, [self.account])[self.account]
            self.account = customer.account
            if customer.pk is not None:
                self.customer_id = customer.pk
        if self.quantity == 0:
            errors["quantity"] = _("An adjustment of 0 changes nothing: write how many units.")
        units: Any = self.quantity  # None if the form could not read the typed quantity.
        if units is not None and abs(units) > MAX_COST:
            errors["quantity"] = _("An adjustment can be of at most %(most)s units.") % {"most": f"{MAX_COST:,}"}
        period_start: Any = self.period_start  # None if the form could not read the typed moment.
        if period_start is not None:
            customer = self.named_customer(conf.DATABASE)
            if error := self._start_error(customer):
                errors["period_start"] = error
            lines = ReportLine.objects.filter(line_id=self.corrects_line_id, report__customer__token=customer.token)
            if self.corrects_line_id and not lines.exists():
                errors["corrects_line_id"] = _("No report of this account has this line.")
        if errors:
            raise ValidationError(errors)

    def _start_error(self, customer: NamedCustomer) -> Any:
        """Return an error message if no billing period of the customer starts at `period_start`, otherwise ""."""
        start = self._start()
        timeline = timelines_of(conf.DATABASE, [customer])[customer.token]
        try:
            period = timeline.at(start)
        except ValueError as error:
            return str(error)
        if not timeline.is_frozen(period) and not Account.objects.filter(identifier__in=customer.present).exists():
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
