"""The table of blocks and allows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_KEY
from ratelimits.models.access.targets import canonical, validate_target
from ratelimits.models.fields.validity import END_NOT_AFTER_START, overlapping, validate_period
from ratelimits.models.history import History, end_now
from ratelimits.models.keys import NAMED, refuse_secret, spelled_key
from ratelimits.models.versioned import Versioned
from ratelimits.models.versions import Edit, Tombstone
from ratelimits.moments.columns import UTCDateTimeField


class Access(Versioned):
    """A block or an allow of a target (a key or network). While it is in force, no rule decides about the target."""

    class Effect(models.TextChoices):
        """A block refuses the target's requests; an allow exempts these requests from all rules."""

        BLOCK = "block", _("block")
        ALLOW = "allow", _("allow")

    class Status(models.IntegerChoices):
        """The HTTP status of a request that a block refuses."""

        FORBIDDEN = 403, _("403 Forbidden")
        TOO_MANY = 429, _("429 Too Many Requests")

    effect = models.CharField(
        _("effect"),
        max_length=5,
        choices=Effect.choices,
        default=Effect.BLOCK,
        help_text=_(
            "A block refuses every request. An allow exempts the key or network from all rules: its requests are not"
            " limited, not counted as usage and not billed."
        ),
    )
    target = models.CharField(
        _("key or network"),
        max_length=LONGEST_KEY,
        validators=[validate_target],
        help_text=_(
            "Such as api_key:4, user:42, header:X-Tenant=acme, account:7 for all keys of an account, 203.0.113.9 for"
            " an address, or a network such as 203.0.113.0/24 or 2001:db8::/32."
        ),
    )
    status = models.PositiveSmallIntegerField(
        _("status"), choices=Status.choices, default=Status.FORBIDDEN, help_text=_("What a blocked client receives.")
    )
    message = models.CharField(
        _("reason for the client"),
        max_length=200,
        blank=True,
        help_text=_("Blocked clients read this text in the response. Leave it empty to tell them nothing."),
    )
    valid_from = UTCDateTimeField(
        _("valid from"), null=True, blank=True, help_text=_("Leave it empty to begin at once.")
    )
    valid_until = UTCDateTimeField(
        _("valid until"), null=True, blank=True, help_text=_("Leave it empty if the block or allow has no end.")
    )
    reason = models.CharField(_("reason"), max_length=200, help_text=_("For your colleagues. Clients never see it."))

    history = History()

    # An edit that changes the target writes a tombstone. Each save writes the target in its canonical form.
    tombstone_fields = ("target",)
    derived_fields = ("target",)

    class Meta:
        verbose_name = _("block or allow")
        verbose_name_plural = _("blocks and allows")
        ordering = ["-pk"]
        default_permissions = ("view",)
        permissions = [("operate", _("Can block, allow, reset and grant"))]
        indexes = [models.Index(fields=["target"], name="ratelimits_access_of")]
        constraints = [
            models.CheckConstraint(
                condition=Q(valid_from=None) | Q(valid_until=None) | Q(valid_until__gt=models.F("valid_from")),
                name="ratelimits_access_period",
                violation_error_message=END_NOT_AFTER_START,
            ),
            # `clean` refuses any two rows that overlap, but rows can be written without `clean`. This constraint
            # refuses a second row without an end: from some moment on, both rows would be in force.
            models.UniqueConstraint(
                fields=["target"],
                condition=Q(valid_until=None),
                name="ratelimits_access_open_ended",
                violation_error_message=_(
                    "This key or network already has a block or an allow without an end: end that block or allow first."
                ),
            ),
            models.CheckConstraint(
                condition=Q(effect__in=["block", "allow"]),
                name="ratelimits_access_effect",
                violation_error_message=_("Choose block or allow."),
            ),
            models.CheckConstraint(
                condition=Q(status__in=[403, 429]),
                name="ratelimits_access_status",
                violation_error_message=_("Choose the status 403 or 429."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.get_effect_display()} {self.target}"

    def in_force(self, at: datetime) -> bool:
        """Return whether the row is in force at a moment."""
        started = self.valid_from is None or self.valid_from <= at
        return started and (self.valid_until is None or at < self.valid_until)

    def end(self, reason: str) -> None:
        """End the row now, and record the reason in its history. Delete a row that has not started yet."""
        end_now(self, reason)

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a save calculates from other values: here, the target in its canonical form."""
        target = values.get("target")
        if isinstance(target, str):
            if target.partition(":")[0] in NAMED:
                # This text comes from code, such as f"user:{pk}". So white space at its end is a part of the name.
                return {"target": spelled_key(target)}
            # An invalid target stays as it is: `clean` reports it.
            with suppress(ValidationError):
                return {"target": canonical(target)}
        return {}

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone for an edit that deletes this row or changes its target.

        Call this on the row as it was before the edit: the tombstone gets the row's target of that time.
        """
        tombstone = super().tombstone(edit)
        tombstone.key = self.target
        return tombstone

    def clean(self) -> None:
        """Raise ValidationError if the row ends before it starts, or overlaps with another row of the same target."""
        validate_period(self.valid_from, self.valid_until)
        with suppress(ValidationError):  # Do not report an invalid target here: the field's own validation does it.
            self.target = canonical(self.target)
        refuse_secret(self.target, "target")
        other = overlapping(self, Access.objects.filter(target=self.target))
        if other is not None:
            message = _("“%(other)s” (number %(pk)s) is in force at the same time: change or end number %(pk)s first.")
            raise ValidationError({"target": message % {"other": other, "pk": other.pk}})
