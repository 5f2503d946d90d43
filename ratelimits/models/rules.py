"""The table of rules. A rule says which requests are counted, by which algorithm, and what a refusal means."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import isfinite
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.limits import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm, algorithm_from_json, fields_of
from ratelimits.algorithms.windows import CALENDAR_UNITS
from ratelimits.conf import conf
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.accounts import Plan, plan_name
from ratelimits.models.fields import sentences
from ratelimits.models.fields.conditions import constraint, has_required_fields, may_prefetch
from ratelimits.models.fields.rule_fields import (
    IPV4_PREFIX,
    IPV6_PREFIX,
    PARAMETERS,
    decimal_field,
    seconds_field,
)
from ratelimits.models.fields.scopes import names_in
from ratelimits.models.history import History
from ratelimits.models.keys import KeyKind
from ratelimits.models.rule_parts.coverage import Callers, Coverage
from ratelimits.models.rule_parts.refusal import Refusal, RefusalStatus
from ratelimits.models.rule_parts.start import Start
from ratelimits.models.validation import rules as validation
from ratelimits.models.versioned import Versioned
from ratelimits.models.versions import Edit, Tombstone


def _algorithm_choices() -> list[tuple[str, Any]]:
    """Return the algorithms as choices, with the default algorithm first."""
    classes = sorted(ALGORITHMS.values(), key=lambda algorithm_class: algorithm_class.id != DEFAULT_ALGORITHM)
    return [(algorithm_class.id, _(algorithm_class.label)) for algorithm_class in classes]


class Rule(Coverage, Refusal, Start, Versioned):
    """One rule: the requests that it counts, its algorithm and numbers, and what a refusal means."""

    class Mode(models.TextChoices):
        """The effect of a refusal by this rule."""

        ENFORCE = "enforce", _("enforce")
        SHADOW = "shadow", _("shadow")
        OFF = "off", _("off")

    class OnFailure(models.TextChoices):
        """What happens while Redis does not answer."""

        PROJECT = "", _("as the project's FAILURE_POLICY says")
        ALLOW = "allow", _("allow")
        DENY = "deny", _("deny")
        LOCAL = "local", _("limit in each process")

    name = models.SlugField(
        _("name"),
        max_length=40,
        help_text=_(
            "A plan's rule replaces the default rule of the same name. If you rename a rule, its counters in Redis"
            " begin again."
        ),
    )
    plan = models.ForeignKey(
        Plan,
        models.CASCADE,
        null=True,
        blank=True,
        related_name="rules",
        verbose_name=_("plan"),
        help_text=_("Leave it empty for a default rule, which applies to everyone."),
    )
    meter = models.SlugField(
        _("meter"),
        max_length=LONGEST_NAME,
        default="requests",
        db_index=False,
        help_text=_("What the rule counts: requests, or another meter for which views give a cost."),
    )
    algorithm = models.CharField(_("algorithm"), max_length=20, choices=_algorithm_choices(), default=DEFAULT_ALGORITHM)

    capacity = models.BigIntegerField(
        _("capacity"), null=True, blank=True, help_text=_("Maximum number of permits at once, or per window.")
    )
    rate = decimal_field(
        _("rate"),
        _("Permits that are added again per period. You may type the rate and the period together here: 10/5min."),
    )
    period = seconds_field(
        _("period"), _("Length of the window, or the time in which the permits of the rate are added.")
    )
    initial = models.CharField(
        _("initial"),
        max_length=20,
        blank=True,
        help_text=_("The permits at the start: “full”, “empty” or a number. A blank field means “full”."),
    )
    window_start = models.CharField(
        _("window start"),
        max_length=10,
        blank=True,
        choices=[("epoch", _("at fixed times of the clock")), ("first_hit", _("at the first request"))],
        help_text=_("Leave it empty for fixed times: the first window began at 1970-01-01 UTC."),
    )
    calendar_unit = models.CharField(
        _("calendar unit"),
        max_length=20,
        blank=True,
        choices=[(unit, _(unit.replace("_", " "))) for unit in CALENDAR_UNITS],
        help_text=_(
            "A billing period is that of the account that makes the request: it has the time zone and the billing"
            " anchor of the account. Without a row of the account, it is the month in UTC."
        ),
    )
    timezone = models.CharField(
        _("time zone"),
        max_length=64,
        blank=True,
        help_text=_("A time zone such as Europe/Paris. Leave it empty for UTC."),
    )
    anchor = models.CharField(
        _("anchor"),
        max_length=32,
        blank=True,
        help_text=_("A local date and time at which a period starts, such as 2026-01-31T06:00."),
    )
    sub_windows = models.PositiveIntegerField(
        _("sub-windows"),
        null=True,
        blank=True,
        help_text=_("How many sub-windows the window has. Leave it empty for 10."),
    )
    weighted = models.BooleanField(
        _("weighted"),
        default=False,
        help_text=_("Of the oldest sub-window, count only the share that is still in the window."),
    )
    delay_after = models.BigIntegerField(
        _("delay after"),
        null=True,
        blank=True,
        help_text=_("Number of requests that pass without delay before others are queued. Leave it empty for 0."),
    )
    max_burst_seconds = seconds_field(
        _("max burst seconds"),
        _(
            "While no requests come, permits are saved: at most as many as the rate adds in this time. Leave it empty"
            " for 1 second."
        ),
    )
    warm_up = seconds_field(_("warm-up"), _("Time until the full rate is reached. Leave it empty for 1 second."))
    cold_factor = decimal_field(
        _("cold factor"),
        _("After a pause, requests start this many times slower than the full rate. Leave it empty for 3."),
    )
    lease_ttl = seconds_field(
        _("lease time to live"),
        _("Time after which a lease that was not released ends by itself. Leave it empty for 60 seconds."),
    )
    max_wait = seconds_field(
        _("max wait"),
        _("Longest time that a request may wait. If it would have to wait longer, it is refused at once."),
    )

    mode = models.CharField(
        _("mode"),
        max_length=10,
        choices=Mode.choices,
        default=Mode.ENFORCE,
        help_text=_("A rule in shadow mode decides and records, but never refuses a request."),
    )
    bills = models.BooleanField(
        _("bills"),
        default=False,
        help_text=_(
            "In the ledger and in reports, the usage that this rule admits has the name of this rule. This does not"
            " switch billing on: without this option, usage is counted in the same way and costs the same. A plan can"
            " have only one rule with this option for each kind of key and each meter. The same is true of the default"
            " rules."
        ),
    )
    on_failure = models.CharField(
        _("while Redis does not answer"),
        max_length=10,
        choices=OnFailure.choices,
        blank=True,
        default=OnFailure.PROJECT,
    )

    prefetch = models.PositiveIntegerField(
        _("permits per prefetch"),
        null=True,
        blank=True,
        help_text=_(
            "Maximum number of requests whose permits a process takes in advance in one call. The process"
            " then spends these permits without asking Redis. These requests are counted as usage at most a"
            " second later. If the process is killed, some of these requests are not counted. For each key"
            " and kind of request, these are fewer than the number in this field. The report then shows a gap."
            " Leave it empty to let Redis decide and count every request."
        ),
    )

    history = History()

    tombstone_fields = ("name", "plan_id")

    class Meta:
        verbose_name = _("rule")
        verbose_name_plural = _("rules")
        ordering = ["name", "plan"]
        constraints = [
            models.UniqueConstraint(
                fields=["name", "plan"],
                name="ratelimits_rule_per_plan",
                violation_error_message=_("This plan already has a rule with this name: change the existing rule."),
            ),
            models.UniqueConstraint(
                fields=["name"],
                condition=Q(plan=None),
                name="ratelimits_rule_by_default",
                violation_error_message=_(
                    "There is already a default rule with this name: change the existing rule, or choose a plan."
                ),
            ),
            # `clean` checks the same conditions, but rows can be written without `clean`.
            models.UniqueConstraint(
                fields=["plan", "key_kind", "meter"],
                condition=Q(bills=True),
                name="ratelimits_one_bills_per_plan",
                violation_error_message=_(
                    "Another rule already bills the same kind of key and the same meter: untick “bills” in one of the"
                    " two rules."
                ),
            ),
            models.UniqueConstraint(
                fields=["key_kind", "meter"],
                condition=Q(bills=True, plan=None),
                name="ratelimits_one_bills_by_default",
                violation_error_message=_(
                    "Another rule already bills the same kind of key and the same meter: untick “bills” in one of the"
                    " two rules."
                ),
            ),
            constraint(
                "complete",
                has_required_fields(),
                _(
                    "Fill in all fields that the algorithm requires: its numbers, and max wait if it makes"
                    " requests wait."
                ),
            ),
            constraint("capacity", Q(capacity=None) | Q(capacity__gte=0), _("Write a capacity of 0 or more.")),
            constraint("rate", Q(rate=None) | Q(rate__gt=0), _("Write a rate above 0.")),
            constraint("period", Q(period=None) | Q(period__gt=0), _("Write a period above 0.")),
            constraint("max_wait", Q(max_wait=None) | Q(max_wait__gte=0), _("Write a max wait of 0 seconds or more.")),
            constraint(
                "prefetch",
                Q(prefetch=None) | Q(prefetch__gte=1) & may_prefetch(),
                _("Leave “permits per prefetch” empty, or write 1 or more for a fixed or calendar window."),
            ),
            constraint("key_kind", Q(key_kind__in=KeyKind.values), _("Choose a value of “counted per” from the list.")),
            constraint("callers", Q(callers__in=Callers.values), _("Choose the callers from the list.")),
            constraint(
                "prefixes",
                (Q(ipv4_prefix=None) | Q(ipv4_prefix__range=(1, IPV4_PREFIX)))
                & (Q(ipv6_prefix=None) | Q(ipv6_prefix__range=(1, IPV6_PREFIX))),
                _("Write an IPv4 prefix from 1 to 32 and an IPv6 prefix from 1 to 64, or leave them empty."),
            ),
            constraint(
                "refusal_status", Q(refusal_status__in=RefusalStatus.values), _("Choose the status from the list.")
            ),
            constraint("mode", Q(mode__in=["enforce", "shadow", "off"]), _("Choose a mode: enforce, shadow or off.")),
            constraint(
                "on_failure",
                Q(on_failure__in=["", "allow", "deny", "local"]),
                _("Choose what happens while Redis does not answer: allow, deny or local, or leave it empty."),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({plan_name(self)})" if self.plan_id else self.name

    def parameters(self) -> dict[str, Any]:
        """Return the algorithm's name and its parameters as in a rule file (JSON). Leave out empty parameters."""
        values = {name: getattr(self, name) for name in fields_of(self.algorithm)}
        return {"algorithm": self.algorithm} | {
            name: value.normalize() if isinstance(value, Decimal) else value
            for name, value in values.items()
            if value is not None and value != ""
        }

    def to_algorithm(self, **changes: Any) -> Algorithm:
        """Return the algorithm with this row's parameters and these changes. Raise ValueError if they are not valid."""
        return algorithm_from_json(self.parameters() | changes)

    def with_numbers(self, changes: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm with the changes of an override. Raise ValueError if the changes are not valid."""
        for name in changes:
            if name not in fields_of(self.algorithm):
                algorithm = self.get_algorithm_display()
                raise ValueError(f"{name} cannot be changed, because {self} is a {algorithm}, which has no {name}")
        return self.to_algorithm(**changes)

    def unreadable(self) -> str:
        """Return the reason why no decision can use this row; "" if the row is valid.

        Rows can be invalid because raw SQL can write any values.
        """
        problem = self.coverage_problem() or self.refusal_problem()
        if problem:
            return problem
        try:
            self.to_algorithm()
            for messages in validation.billing_period_errors(self).values():
                return str(messages[0]).rstrip(".")
        except (ValueError, TypeError, ArithmeticError) as error:
            return str(error)
        # On PostgreSQL the value can be NaN, and NaN passes every constraint.
        if self.max_wait is not None and not isfinite(self.max_wait):
            return f"max_wait must be a number, not {self.max_wait}"
        return ""

    def sentence(self) -> str:
        """Return the rule as a sentence: "5 requests per second, bursts to 10, per API key"."""
        reason = self.unreadable()
        if reason:
            return str(_("not in force: %(error)s") % {"error": reason})
        unit = conf.UNITS.get(self.meter, self.meter)
        excepted = names_in(self.except_scopes)
        return sentences.sentence(self.to_algorithm(), unit, self, self.scope, excepted, self.max_wait)

    def tombstone(self, edit: Edit) -> Tombstone:
        """Return the tombstone that records the deletion of this row, or the change of its name or plan."""
        tombstone = super().tombstone(edit)
        tombstone.rule, tombstone.plan = self.name, self.plan_id
        return tombstone

    def clean(self) -> None:
        """Clear the fields of other algorithms. Raise ValidationError with a message for each invalid field."""
        super().clean()
        if self.algorithm not in ALGORITHMS:
            return  # The validation of the field reports an unknown algorithm.
        field_names = fields_of(self.algorithm)
        for name, empty in PARAMETERS.items():
            if name not in field_names:
                setattr(self, name, empty)
        if not ALGORITHMS[self.algorithm].may_wait:
            self.max_wait = None
        # Find the model by its name: its module imports this module, so an import here would be circular.
        overrides: Any = self._meta.apps.get_model("ratelimits", "KeyOverride")
        validation.check_rule(self, Rule.objects.all(), overrides.objects.all())
