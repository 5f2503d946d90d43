"""Overrides. Under an override, a rule has other numbers, or another mode, for one key or account."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ratelimits.engine.keys import LONGEST_KEY
from ratelimits.models.fields.rule_fields import decimal_field, seconds_field
from ratelimits.models.fields.validity import END_NOT_AFTER_START, validate_period
from ratelimits.models.history import History, end_now
from ratelimits.models.keys import canonical_key, derived_key, refuse_secret, validate_key
from ratelimits.models.rules import Rule
from ratelimits.models.validation import rules as validation
from ratelimits.models.versioned import Versioned
from ratelimits.models.versions import Edit, Tombstone
from ratelimits.moments.columns import UTCDateTimeField


class KeyOverride(Versioned):
    """Other numbers, or another mode, for one key or account under all rules with the name `rule`."""

    #: The numbers that an override can change.
    NUMBERS = ("capacity", "rate", "period")

    key = models.CharField(
        _("key"),
        max_length=LONGEST_KEY,
        validators=[validate_key],
        help_text=_(
            "Such as api_key:4, user:42, ip:203.0.113.9, header:X-Tenant=acme, or account:7 for all keys of an account."
        ),
    )
    rule = models.SlugField(
        _("rule"), max_length=40, help_text=_("Name of the rule. The override applies in every plan.")
    )
    capacity = models.BigIntegerField(
        _("capacity"), null=True, blank=True, help_text=_("Leave it empty to use the rule's value.")
    )
    rate = decimal_field(_("rate"), _("Leave it empty to use the rule's value."))
    period = seconds_field(_("period"), _("Leave it empty to use the rule's value."))
    mode = models.CharField(_("mode"), max_length=10, choices=[("", _("unchanged")), *Rule.Mode.choices], blank=True)
    valid_from = UTCDateTimeField(_("valid from"), null=True, blank=True)
    valid_until = UTCDateTimeField(_("valid until"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=200, blank=True)
    shard = models.SmallIntegerField(_("shard"), editable=False, db_index=True, default=0)

    history = History()

    tombstone_fields = ("key", "rule")
    # Each save calculates the shard from the key, and writes the key in its canonical form.
    derived_fields = ("shard", "key")

    class Meta:
        verbose_name = _("override")
        verbose_name_plural = _("overrides")
        ordering = ["key", "rule", "valid_from"]
        indexes = [models.Index(fields=["key", "rule"], name="ratelimits_override_of")]
        constraints = [
            models.CheckConstraint(
                condition=Q(valid_from=None) | Q(valid_until=None) | Q(valid_until__gt=models.F("valid_from")),
                name="ratelimits_override_period",
                violation_error_message=END_NOT_AFTER_START,
            ),
            # `clean` refuses any two rows that overlap, but rows can be written without `clean`. This constraint
            # refuses two rows without an end, because both would be in force after the later of their starts.
            models.UniqueConstraint(
                fields=["key", "rule"],
                condition=Q(valid_until=None),
                name="ratelimits_override_open_ended",
                violation_error_message=_(
                    "This key already has an override of this rule without an end: change or end that override first."
                ),
            ),
            models.CheckConstraint(
                condition=Q(mode__in=["", "enforce", "shadow", "off"]),
                name="ratelimits_override_mode",
                violation_error_message=_("Leave the mode empty, or choose enforce, shadow or off."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.rule} for {self.key}"

    def changes(self) -> dict[str, Any]:
        """Return the numbers that the override changes, by field name."""
        return {name: getattr(self, name) for name in self.NUMBERS if getattr(self, name) is not None}

    def numbers_error(self, rules: Iterable[Rule]) -> str:
        """Return an error message if one of these rules does not accept the numbers, otherwise ""."""
        changes = self.changes()
        for rule in rules if changes else ():
            try:
                rule.with_numbers(changes)
            except ValueError as error:
                return str(error)
        return ""

    def end(self, reason: str) -> None:
        """End the override now, and record the reason in its history. Delete an override that has not started yet."""
        end_now(self, reason)

    @classmethod
    def derive(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return derived_key(values)

    def tombstone(self, edit: Edit) -> Tombstone:
        tombstone = super().tombstone(edit)
        tombstone.key, tombstone.shard, tombstone.rule = self.key, self.shard, self.rule
        return tombstone

    def clean_numbers(self) -> None:
        """Raise ValidationError if the numbers are not valid, as `check_numbers` says. Ignore other overrides."""
        validation.check_numbers(self, Rule.objects.all())

    def clean_values(self, rules: Mapping[str, Sequence[Rule]]) -> None:
        """Raise ValidationError if the values are not valid. Ignore other overrides. `rules` has all rules, by name."""
        refuse_secret(self.key)
        validate_period(self.valid_from, self.valid_until)
        validation.check_numbers_under(self, rules.get(self.rule, ()), sorted(rules))

    def clean(self) -> None:
        """Raise ValidationError if the values are not valid, or if another override is in force at the same time."""
        self.key = canonical_key(self.key)
        refuse_secret(self.key)
        validate_period(self.valid_from, self.valid_until)
        validation.check_override(self, KeyOverride.objects.all(), Rule.objects.all())


def rules_by_name(using: str) -> dict[str, list[Rule]]:
    """Return all rules by name. Rules of different plans can have the same name."""
    by_name: dict[str, list[Rule]] = {}
    for rule in Rule.objects.using(using).select_related("plan"):
        by_name.setdefault(rule.name, []).append(rule)
    return by_name


def valid_rules(rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules that an override can change. Leave out rules with invalid values."""
    return [rule for rule in rules if not rule.unreadable()]
