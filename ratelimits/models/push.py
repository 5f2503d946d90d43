"""The delivery ledger: which report lines went to which billing system, as what, and what it answered.

A row of PushDelivery is one event of one report line, with the text that is sent and never changes. Its `line_id` is
what the billing system knows the event by, whoever sends it and however often.
"""

from __future__ import annotations

from django.db import connections, models
from django.utils.translation import gettext_lazy as _

from ratelimits.models.reports import Report


class PushReceiver(models.Model):
    """A billing system of RATELIMITS["PUSH"], and how the last request to it went."""

    name = models.CharField(_("name"), max_length=40, primary_key=True)
    paused_until = models.DateTimeField(
        _("paused until"), null=True, blank=True, help_text=_("It was away, busy or refused the key: nothing is sent.")
    )
    failures = models.PositiveIntegerField(_("failures"), default=0, help_text=_("In a row."))
    error = models.CharField(_("last error"), max_length=300, blank=True)
    answered_at = models.DateTimeField(_("last answer"), null=True, blank=True)

    class Meta:
        verbose_name = _("billing system")
        verbose_name_plural = _("billing systems")

    def __str__(self) -> str:
        return self.name

    @classmethod
    def lock(cls, using: str, name: str) -> PushReceiver:
        """Return the row of a receiver, locked until the transaction ends; it is made if there is none."""
        rows = cls.objects.using(using).filter(name=name)
        if not connections[using].features.has_select_for_update:
            # A write as the transaction's first statement takes SQLite's lock without ever upgrading a read one.
            rows.update(failures=models.F("failures"))
        found = rows.select_for_update().first()
        if found is None:
            PushReceiver.objects.using(using).bulk_create([PushReceiver(name=name)], ignore_conflicts=True)
            found = rows.select_for_update().get()
        return found


class PushedReport(models.Model):
    """That the lines which a version of a report brought in are in the delivery ledger, for a receiver."""

    receiver = models.ForeignKey(PushReceiver, models.PROTECT, related_name="reports", verbose_name=_("billing system"))
    report = models.ForeignKey(Report, models.PROTECT, related_name="+", verbose_name=_("report"))
    lines = models.PositiveIntegerField(_("lines"), help_text=_("That have something to bill."))
    planned_at = models.DateTimeField(_("planned at"), auto_now_add=True)

    class Meta:
        verbose_name = _("pushed report")
        verbose_name_plural = _("pushed reports")
        constraints = [models.UniqueConstraint(fields=["receiver", "report"], name="ratelimits_pushed_once")]

    def __str__(self) -> str:
        return f"{self.report_id} → {self.receiver_id}"


class PushDelivery(models.Model):
    """One event of a report line, for a receiver: sent until the receiver's answer, or a person, settles it."""

    class State(models.TextChoices):
        """What is known of it."""

        WAITING = "waiting", _("waiting")
        ACCEPTED = "accepted", _("accepted")
        REFUSED = "refused", _("refused")
        UNSURE = "unsure", _("answer lost")
        EXPIRED = "expired", _("too old to be taken")
        SKIPPED = "skipped", _("no customer")
        ELSEWHERE = "elsewhere", _("billed elsewhere")

    receiver = models.ForeignKey(
        PushReceiver, models.PROTECT, related_name="deliveries", verbose_name=_("billing system"), db_index=False
    )
    report = models.ForeignKey(Report, models.PROTECT, related_name="+", verbose_name=_("report"))
    line_id = models.CharField(_("line"), max_length=32, help_text=_("What the billing system knows the event by."))
    customer = models.CharField(_("customer"), max_length=255, blank=True)
    meter = models.CharField(_("meter"), max_length=255)
    overage = models.BigIntegerField(_("overage"), help_text=_("Units that go beyond the plan."))
    event = models.TextField(_("event"), blank=True, help_text=_("What is sent, the same each time."))
    happened_at = models.DateTimeField(_("of"), help_text=_("The moment that the event names."))
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.WAITING)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    together = models.PositiveIntegerField(
        _("together"), help_text=_("How many events one request has at most; less after one that failed as a whole.")
    )
    due_at = models.DateTimeField(_("due at"))
    claim = models.UUIDField(_("claim"), null=True, blank=True, editable=False)
    unsure_since = models.DateTimeField(
        _("answer lost since"), null=True, blank=True, help_text=_("The first request that may have been taken.")
    )
    settled_at = models.DateTimeField(_("settled at"), null=True, blank=True)
    note = models.CharField(_("note"), max_length=400, blank=True, help_text=_("The last answer, or who settled it."))

    class Meta:
        verbose_name = _("push delivery")
        verbose_name_plural = _("push deliveries")
        ordering = ["-pk"]
        constraints = [models.UniqueConstraint(fields=["line_id", "receiver"], name="ratelimits_push_once")]
        # Not of waiting rows alone: SQLite would not use such an index.
        indexes = [
            models.Index(fields=["receiver", "state", "id"], name="ratelimits_push_state"),
            models.Index(fields=["receiver", "state", "unsure_since"], name="ratelimits_push_unsure"),
        ]

    def __str__(self) -> str:
        return f"{self.line_id} → {self.receiver_id}: {self.get_state_display()}"
