"""The delivery ledger: the report lines that are sent to billing systems, and the responses.

An *event* is the message about one report line to one billing system (the *receiver*). Each row of `PushDelivery` is
about one event. If the billing system perhaps has the event, the text of the event never changes again. If an event
arrives twice, the billing system recognises it by its `line_id`.
"""

from __future__ import annotations

from django.db import connections, models
from django.utils.translation import gettext_lazy as _

from ratelimits.billing.models.reports import Report
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.moments.columns import UTCDateTimeField


class PushReceiver(models.Model):
    """A billing system of RATELIMITS["PUSH"], and the result of the last request to it."""

    name = models.CharField(_("name"), max_length=40, primary_key=True)
    paused_until = UTCDateTimeField(
        _("paused until"),
        null=True,
        blank=True,
        help_text=_(
            "Nothing is sent before this time, because the billing system was unreachable or busy, or refused the"
            " KEY of the settings."
        ),
    )
    failures = models.PositiveIntegerField(_("failures"), default=0, help_text=_("Failures since the last success."))
    error = models.CharField(_("last error"), max_length=300, blank=True)
    answered_at = UTCDateTimeField(_("last answer"), null=True, blank=True)

    class Meta:
        verbose_name = _("billing system")
        verbose_name_plural = _("billing systems")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def lock(cls, using: str, name: str) -> PushReceiver:
        """Lock the receiver's row until the transaction ends, and return the row. Add the row if it does not exist."""
        rows = cls.objects.using(using).filter(name=name)
        if not connections[using].features.has_select_for_update:
            # On SQLite, a write as the first statement of the transaction takes the write lock at once. If the
            # transaction began with a read, a later write could fail.
            rows.update(failures=models.F("failures"))
        row = rows.select_for_update().first()
        if row is None:
            PushReceiver.objects.using(using).bulk_create([PushReceiver(name=name)], ignore_conflicts=True)
            row = rows.select_for_update().get()
        return row


class PushedReport(models.Model):
    """A mark that a report's new lines were added to the delivery ledger for one receiver."""

    receiver = models.ForeignKey(PushReceiver, models.PROTECT, related_name="reports", verbose_name=_("billing system"))
    report = models.ForeignKey(Report, models.PROTECT, related_name="+", verbose_name=_("report"))
    lines = models.PositiveIntegerField(_("lines"), help_text=_("Lines that have something to bill."))
    planned_at = UTCDateTimeField(_("planned at"), auto_now_add=True)

    class Meta:
        verbose_name = _("pushed report")
        verbose_name_plural = _("pushed reports")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["receiver", "report"], name="ratelimits_pushed_once")]

    def __str__(self) -> str:
        return f"{self.report_id} → {self.receiver_id}"


class PushDelivery(models.Model):
    """The event about one report line for one receiver. Sending is repeated until the state is no longer WAITING."""

    class State(models.TextChoices):
        """WAITING: the event must still be sent. Each other state says why nothing is sent any more."""

        WAITING = "waiting", _("waiting")
        ACCEPTED = "accepted", _("accepted")
        REFUSED = "refused", _("refused")
        UNSURE = "unsure", _("answer lost")
        EXPIRED = "expired", _("too old for the billing system")
        SKIPPED = "skipped", _("no customer")
        ELSEWHERE = "elsewhere", _("billed elsewhere")

    receiver = models.ForeignKey(
        PushReceiver, models.PROTECT, related_name="deliveries", verbose_name=_("billing system"), db_index=False
    )
    report = models.ForeignKey(Report, models.PROTECT, related_name="+", verbose_name=_("report"))
    line_id = models.CharField(
        _("line"), max_length=32, help_text=_("The billing system recognises the event by this id.")
    )
    customer = models.CharField(_("customer"), max_length=LONGEST_NAME, blank=True)
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    overage = models.BigIntegerField(_("overage"), help_text=_("Units beyond the included quantity."))
    event = models.TextField(_("event"), blank=True, help_text=_("The text that is sent; it is the same each time."))
    happened_at = UTCDateTimeField(_("time of the usage"), help_text=_("The moment of usage that the event states."))
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.WAITING)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    together = models.PositiveIntegerField(
        _("events per request"),
        help_text=_(
            "Maximum number of events in the request that sends this event. The number is reduced after a request whose"
            " events all failed together."
        ),
    )
    due_at = UTCDateTimeField(_("due at"))
    #: The token of the process that has claimed the event, to send it (see `billing/push/deliveries.py`). Empty if no
    #: process has claimed it.
    claim = models.UUIDField(_("claim"), null=True, blank=True, editable=False)
    unsure_since = UTCDateTimeField(
        _("answer lost since"),
        null=True,
        blank=True,
        help_text=_("The time of the first request that was perhaps accepted."),
    )
    settled_at = UTCDateTimeField(_("settled at"), null=True, blank=True)
    note = models.CharField(
        _("note"),
        max_length=400,
        blank=True,
        help_text=_("The last answer of the billing system, or who settled the delivery."),
    )

    class Meta:
        verbose_name = _("push delivery")
        verbose_name_plural = _("push deliveries")
        default_permissions = ("view",)
        ordering = ["-pk"]
        constraints = [models.UniqueConstraint(fields=["line_id", "receiver"], name="ratelimits_push_once")]
        # The indexes contain all rows: SQLite would not use an index of only the waiting rows.
        indexes = [
            models.Index(fields=["receiver", "state", "id"], name="ratelimits_push_state"),
            models.Index(fields=["receiver", "state", "unsure_since"], name="ratelimits_push_unsure"),
        ]

    def __str__(self) -> str:
        return f"{self.line_id} → {self.receiver_id}: {self.get_state_display()}"
