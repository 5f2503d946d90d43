"""Alerts, the channels to which they are sent, and the state of each delivery.

An alert says that an account's usage has reached a threshold. An alert and its deliveries are written in one
transaction, and the alert never changes. Periods are in seconds since 1970 UTC, as in the ledger.
"""

from __future__ import annotations

import binascii
import secrets
import uuid
from base64 import b64decode, b64encode

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator, URLValidator
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.accounts import Account
from ratelimits.models.customers import Customer
from ratelimits.moments import moment
from ratelimits.moments.columns import UTCDateTimeField

#: Prefix of a webhook's secret (Standard Webhooks); the key in base64 follows it.
SECRET_PREFIX = "whsec_"  # noqa: S105
#: The namespace of the ids of alerts (see `uuid.uuid5`). All processes must use the same namespace.
_NAMESPACE = uuid.UUID("0ba6c7ad-5a1d-5b8e-9d3c-6f1f6a5f3a10")


def new_secret() -> str:
    """Return a new webhook secret of 256 random bits."""
    return SECRET_PREFIX + b64encode(secrets.token_bytes(32)).decode()


def secret_key(secret: str) -> bytes:
    """Return the key in a webhook's secret.

    Raise ValueError if the prefix is missing, or if the key is not 24 to 64 bytes in base64.
    """
    try:
        key = b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a secret is {SECRET_PREFIX} followed by base64: {error}") from error
    if not secret.startswith(SECRET_PREFIX) or not 24 <= len(key) <= 64:
        raise ValueError(f"a secret is {SECRET_PREFIX} followed by 24 to 64 bytes in base64")
    return key


def validate_secret(secret: str) -> None:
    """Raise ValidationError if the text is not a webhook's secret."""
    try:
        secret_key(secret)
    except ValueError as error:
        raise ValidationError(str(error), code="secret") from error


class AlertChannel(models.Model):
    """The destinations of an account's alerts: an e-mail address, a webhook, or both."""

    account = models.ForeignKey(Account, models.CASCADE, related_name="alert_channels", verbose_name=_("account"))
    email = models.EmailField(_("e-mail address"), blank=True)
    webhook_url = models.CharField(
        _("webhook"),
        max_length=500,
        blank=True,
        validators=[URLValidator(schemes=["https", "http"])],
        help_text=_("A URL that accepts a signed POST, such as https://example.com/alerts."),
    )
    secret = models.CharField(
        _("secret"),
        max_length=100,
        default=new_secret,
        validators=[validate_secret],
        help_text=_("Webhooks are signed with this secret: give the secret to the receiver of the webhooks."),
    )
    active = models.BooleanField(_("active"), default=True)

    class Meta:
        verbose_name = _("alert channel")
        verbose_name_plural = _("alert channels")
        ordering = ["account", "pk"]
        constraints = [
            models.CheckConstraint(
                condition=~Q(email="", webhook_url=""),
                name="ratelimits_channel_leads_somewhere",
                violation_error_message=_("Write an e-mail address, a webhook, or both."),
            )
        ]

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.email, self.webhook_url)))


class Alert(models.Model):
    """A notice that a customer's usage has reached a percentage of a quantity in a billing period.

    In a billing period, a customer gets only one alert for the same meter, rule, percentage and quantity. `account` is
    the customer's account at the time of the alert.
    """

    class Basis(models.TextChoices):
        """Whether the threshold is a percentage of what the plan includes, or of a rule's limit."""

        INCLUDED = "included", _("what the plan includes")
        LIMIT = "limit", _("the rule's limit")

    id = models.UUIDField(primary_key=True, editable=False)
    customer = models.ForeignKey(Customer, models.PROTECT, related_name="+", db_index=False, verbose_name=_("customer"))
    account = models.CharField(_("account"), max_length=LONGEST_NAME)
    meter = models.CharField(_("meter"), max_length=LONGEST_NAME)
    rule = models.BigIntegerField(
        _("rule"),
        help_text=_(
            "The threshold is a percentage of this rule's limit, or of the plan's included quantity if this is 0."
        ),
    )
    rule_name = models.CharField(_("rule's name"), max_length=40, blank=True)
    key = models.CharField(
        _("key"),
        max_length=LONGEST_NAME,
        blank=True,
        help_text=_("The key that the rule counts; empty for the account as a whole."),
    )
    period = models.BigIntegerField(_("billing period (start, in s)"))
    period_end = models.BigIntegerField(_("billing period (end, in s)"))
    threshold = models.PositiveIntegerField(
        _("threshold"), validators=[MinValueValidator(1)], help_text=_("In percent.")
    )
    basis = models.CharField(_("percentage of"), max_length=10, choices=Basis.choices)
    used = models.BigIntegerField(_("used"), help_text=_("Units used when the alert was raised."))
    quantity = models.BigIntegerField(_("quantity"), help_text=_("The number of units that counts as 100 percent."))
    raised_at = UTCDateTimeField(_("raised at"), auto_now_add=True)

    class Meta:
        verbose_name = _("alert")
        verbose_name_plural = _("alerts")
        default_permissions = ("view",)
        ordering = ["-raised_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["customer", "period", "meter", "rule", "threshold", "quantity"], name="ratelimits_alert_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.account} {self.meter} {self.threshold} % {moment(self.period * 1_000_000):%Y-%m-%d}"

    @staticmethod
    def id_of(token: str, period: int, meter: str, rule: int, threshold: int, quantity: int) -> uuid.UUID:
        """Return the primary key of the alert with these values. Every process calculates the same key."""
        return uuid.uuid5(_NAMESPACE, "\n".join((token, meter, *map(str, (period, rule, threshold, quantity)))))


class AlertDelivery(models.Model):
    """The delivery of one alert to one destination. The app tries until the delivery succeeds or is given up.

    A destination is the e-mail address or the webhook of a channel, or the project's receivers of a Django signal. For
    a signal, `channel` is None. `due_at` is the moment of the next attempt.

    Each e-mail and each webhook contains the delivery's primary key, so that a receiver recognises a repeated message.
    """

    class Kind(models.TextChoices):
        """How the alert is sent. A signal is a Django signal, which the project's own code can receive."""

        SIGNAL = "signal", _("signal")
        EMAIL = "email", _("e-mail")
        WEBHOOK = "webhook", _("webhook")

    class State(models.TextChoices):
        """Whether the delivery must still be tried, has succeeded, or was given up."""

        WAITING = "waiting", _("waiting")
        DONE = "done", _("done")
        FAILED = "failed", _("given up")

    id = models.UUIDField(primary_key=True, editable=False)
    alert = models.ForeignKey(Alert, models.CASCADE, related_name="deliveries", verbose_name=_("alert"))
    kind = models.CharField(_("sent as"), max_length=10, choices=Kind.choices)
    channel = models.ForeignKey(
        AlertChannel, models.SET_NULL, null=True, blank=True, related_name="+", verbose_name=_("channel")
    )
    state = models.CharField(_("state"), max_length=10, choices=State.choices, default=State.WAITING)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    due_at = UTCDateTimeField(_("due at"))
    done_at = UTCDateTimeField(_("done at"), null=True, blank=True)
    error = models.CharField(_("last error"), max_length=300, blank=True)

    class Meta:
        verbose_name = _("alert delivery")
        verbose_name_plural = _("alert deliveries")
        default_permissions = ("change", "view")
        ordering = ["due_at"]
        indexes = [
            models.Index(fields=["due_at"], condition=Q(state="waiting"), name="ratelimits_delivery_due"),
            models.Index(fields=["state", "due_at"], name="ratelimits_delivery_state"),
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()}: {self.get_state_display()}"

    @staticmethod
    def id_of(alert: uuid.UUID, kind: str, channel: int | None) -> uuid.UUID:
        """Return the primary key of the delivery with these values. Every process calculates the same key."""
        return uuid.uuid5(alert, f"{kind}:{channel or ''}")


class AlertState(models.Model):
    """The position in a shard's chain of batches up to which usage was checked for alerts."""

    shard = models.PositiveIntegerField(_("shard"), primary_key=True)
    position = models.BigIntegerField(
        _("position"), default=0, help_text=_("Position in the shard's chain of batches.")
    )
    terms = models.CharField(
        _("terms"),
        max_length=200,
        blank=True,
        help_text=_("Configuration version and thresholds with which usage was checked."),
    )
    since = models.BigIntegerField(_("since (µs)"), help_text=_("Periods that had ended at this moment get no alerts."))

    class Meta:
        verbose_name = _("alert state")
        verbose_name_plural = _("alert states")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.shard:02d}"
