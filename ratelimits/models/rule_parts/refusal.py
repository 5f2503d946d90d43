"""The fields of a rule that say what a refused client receives."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class RefusalStatus(models.IntegerChoices):
    """The HTTP status of a request that a rule refuses."""

    PAYMENT_REQUIRED = 402, _("402 Payment Required")
    FORBIDDEN = 403, _("403 Forbidden")
    NOT_FOUND = 404, _("404 Not Found")
    TOO_MANY = 429, _("429 Too Many Requests")
    UNAVAILABLE = 503, _("503 Service Unavailable")


class Refusal(models.Model):
    """The part of a rule that says what a refused client receives."""

    refusal_status = models.PositiveSmallIntegerField(
        _("status"), choices=RefusalStatus.choices, default=RefusalStatus.TOO_MANY
    )
    refusal_text = models.CharField(
        _("text for the client"),
        max_length=500,
        blank=True,
        help_text=_(
            "Refused clients read this text in the response. If it is empty, the response says when to try again."
        ),
    )

    class Meta:
        abstract = True

    def refusal_problem(self) -> str:
        """Return the reason why no response can be made from these fields; "" if they are valid."""
        if self.refusal_status not in RefusalStatus.values:
            return f"refusal_status {self.refusal_status!r} is not valid: use one of {RefusalStatus.values}"
        return ""
