"""What makes no sense in a rule or an override, said at the field that is wrong and with what to do about it.

Rule.clean() and KeyOverride.clean() come here; the admin and rules as code both go through them.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Decimal
from typing import TYPE_CHECKING, Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.limits import fields_of
from ratelimits.conf import conf
from ratelimits.engine.keys import name_id
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models.fields.rule_fields import PARAMETERS, WAITS, required_fields
from ratelimits.models.fields.sentences import WHOSE, number
from ratelimits.models.fields.validity import overlapping
from ratelimits.models.keys import COUNTED, COVERS
from ratelimits.models.validation.crowding import too_many

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ratelimits.models.overrides import KeyOverride
    from ratelimits.models.rules import Rule

Errors = dict[str, list[Any]]

_ADVICE = {
    "rate": _("Write how many permits come back per period, such as 5."),
    "capacity": _("Write how many permits can be taken at once, such as 10. At 0 nothing passes."),
    "period": _("Write it in seconds, such as 60, or with its unit, such as 5 min, 1 h or 1 day."),
    "calendar_unit": _("Choose hour, day, week, month or year."),
}


def check_rule(rule: Rule, rules: QuerySet[Rule], overrides: QuerySet[KeyOverride]) -> None:
    """Raise ValidationError, with all that is wrong, unless the rule makes sense and gets along with all others."""
    errors = _parameters(rule) or _overrides_of(rule, overrides)
    errors |= _name(rule, rules) | _billing(rule, rules) | _allotment(rule) | _crowd(rule, rules)
    if errors:
        raise ValidationError(errors)


def _parameters(rule: Rule) -> Errors:
    """What is wrong with the algorithm's own fields; defaults are filled in where nothing was said."""
    missing = [name for name in required_fields(rule.algorithm) if getattr(rule, name) in (None, "")]
    if missing:
        return {name: [_ADVICE[name]] for name in missing}
    try:
        algorithm = rule.to_algorithm()
    except ValueError as error:
        return _at_field(str(error)) | _not_above_zero(rule)
    for name in fields_of(rule.algorithm):
        if getattr(rule, name) in (None, ""):
            setattr(rule, name, getattr(algorithm, name) or PARAMETERS[name])
    if rule.algorithm in WAITS and rule.max_wait is None:
        suggestion = f"{suggested_max_wait(rule):f}"
        message = _("Say how many seconds a request may wait, such as %(suggestion)s.")
        return {"max_wait": [message % {"suggestion": suggestion}]}
    if rule.max_wait is not None and rule.max_wait < 0:
        return {"max_wait": [_("Write 0 to let nobody wait, or a number of seconds.")]}
    return {}


def _not_above_zero(rule: Rule) -> Errors:
    """Say it of each such number: the engine stops at the first mistake of all."""
    given = {name: getattr(rule, name) for name in ("rate", "period") if name in fields_of(rule.algorithm)}
    return {
        name: [_("%(name)s must be above 0, not %(value)s.") % {"name": name, "value": number(value)}, _ADVICE[name]]
        for name, value in given.items()
        if isinstance(value, Decimal | int) and value <= 0
    }


def _at_field(message: str) -> Errors:
    """The engine's messages start with the name of the field, except about what a field names."""
    first = re.split(r"\W", message, maxsplit=1)[0]
    if message.startswith("unknown time zone"):
        first = "timezone"
    elif "calendar_unit" in message:
        first = "calendar_unit"
    field = first if first in PARAMETERS else "algorithm"
    return {field: [f"{message}.", *([_ADVICE[field]] if field in _ADVICE else [])]}


def suggested_max_wait(rule: Rule) -> Decimal:
    """The longest wait in seconds that the algorithm itself leads to: for a queue, that of all its places."""
    wait: Decimal | None
    if rule.algorithm == "smooth_bursty":
        wait = rule.max_burst_seconds
    elif rule.algorithm == "smooth_warming_up":
        wait = rule.warm_up
    else:
        assert rule.capacity is not None
        assert rule.period is not None
        assert rule.rate is not None
        wait = rule.capacity * rule.period / rule.rate
    return Decimal(1 if wait is None else wait).quantize(Decimal("0.000001"), ROUND_UP).normalize()


def _overrides_of(rule: Rule, overrides: QuerySet[KeyOverride]) -> Errors:
    """An edit must leave the overrides of the rule in force."""
    if rule._state.adding:
        return {}
    names, rows = overrides.model.NUMBERS, overrides.filter(rule=rule.name).order_by()
    for numbers in rows.values_list(*names).distinct():
        changes = {name: n for name, n in zip(names, numbers, strict=True) if n is not None}
        try:
            rule.with_numbers(changes)
        except ValueError as error:
            shown = ", ".join(f"{name} {number(n)}" for name, n in changes.items())
            message = _("An override of this rule (%(shown)s) would no longer fit: %(error)s. Change it first.")
            return {"algorithm": [message % {"shown": shown, "error": error}]}
    return {}


def _name(rule: Rule, rules: QuerySet[Rule]) -> Errors:
    others = rules.exclude(name=rule.name).order_by().values_list("name", flat=True).distinct()
    twin = next((other for other in others if name_id(other) == name_id(rule.name)), None)
    if twin is None:
        return {}
    message = _("Rename it: “%(name)s” and “%(twin)s” would be kept under the same number in Redis (crc32).")
    return {"name": [message % {"name": rule.name, "twin": twin}]}


def _crowd(rule: Rule, rules: QuerySet[Rule]) -> Errors:
    crowd = too_many(rules.using(conf.DATABASE), rule)
    if crowd is None:
        return {}
    message = _(
        "With this rule a request in scope “%(scope)s” could meet %(count)s rules, and a decision takes at most "
        "%(most)s: switch others off, delete them, or give them other scopes first."
    )
    return {NON_FIELD_ERRORS: [message % {"scope": crowd.scope, "count": crowd.rules, "most": MAX_LIMITS}]}


def _billing(rule: Rule, rules: QuerySet[Rule]) -> Errors:
    """At most one rule bills for a kind of key and a meter: in a plan, together with the default rules."""
    if not rule.bills:
        return {}
    billing = rules.filter(bills=True, key_kind=rule.key_kind, meter=rule.meter)
    billing = billing.exclude(name=rule.name).exclude(pk=rule.pk)
    twin = billing.filter(plan=rule.plan_id).first()
    message = _("“%(twin)s” already bills %(meter)s %(whose)s here: untick it there first, or here.")
    if twin is None:
        # A plan's rules come on top of the default ones, except those whose names they have.
        message = _(
            "“%(twin)s” bills %(meter)s %(whose)s for the same keys: give both the same name, so that "
            "the plan's takes the place of the default one, or untick one of them."
        )
        if rule.plan_id is not None:
            replaced = rules.filter(plan=rule.plan_id).values("name")
            twin = billing.filter(plan=None).exclude(name__in=replaced).first()
        else:
            replacing = rules.filter(name=rule.name).exclude(plan=None).values("plan")
            twin = billing.exclude(plan=None).exclude(plan__in=replacing).first()
    if twin is None:
        return {}
    return {"bills": [message % {"twin": twin, "meter": rule.meter, "whose": WHOSE[rule.key_kind]()}]}


def _allotment(rule: Rule) -> Errors:
    """Permits are taken ahead only where they come back at a moment that is known, and where nobody bills them."""
    if rule.allotment is None:
        return {}
    if rule.bills:
        message = _("Untick “bills”, or leave this empty: what a process spends by itself is not counted as usage.")
    elif rule.algorithm not in ("fixed_window", "calendar_window") or rule.window_start == "first_hit":
        message = _(
            "Leave this empty, or choose a fixed window at the clock's full periods or a calendar window: anywhere else"
            " permits come back while a process holds others, and together they would be more than the limit."
        )
    elif rule.allotment < 1:
        message = _("Write 1 or more, or leave it empty.")
    else:
        return {}
    return {"allotment": [message]}


def check_override(override: KeyOverride, overrides: QuerySet[KeyOverride], rules: QuerySet[Rule]) -> None:
    """Raise ValidationError if no rule could follow it, it changes nothing, or it meets another one in time."""
    changes = override.changes()
    if not changes and not override.mode:
        raise ValidationError(_("It changes nothing: give a capacity, rate, period or mode."))
    named = list(rules.filter(name=override.rule))
    if not named:
        names = ", ".join(sorted(rules.order_by().values_list("name", flat=True).distinct()[:20]))
        message = _("No rule has this name; there are: %(names)s.")
        raise ValidationError({"rule": message % {"names": names or "–"}})
    if changes:
        for rule in named:
            _numbers(override, rule, changes)
    _overlap(override, overrides)


def _numbers(override: KeyOverride, rule: Rule, changes: dict[str, Any]) -> None:
    own = COVERS.get(override.key.partition(":")[0])
    if own is None:
        return  # said by the field itself
    if not COUNTED[rule.key_kind] & own:
        message = _(
            "%(rule)s counts %(whose)s, which others share with %(key)s: numbers cannot differ for this "
            "key alone. Override the mode instead, or the numbers of a wider key."
        )
        shown = {"rule": rule, "whose": WHOSE[rule.key_kind](), "key": override.key}
        raise ValidationError(message % shown)
    try:
        rule.with_numbers(changes)
    except ValueError as error:
        field = next((name for name in changes if str(error).startswith(name)), next(iter(changes)))
        raise ValidationError({field: f"{error}."}) from error


def _overlap(override: KeyOverride, overrides: QuerySet[KeyOverride]) -> None:
    other = overlapping(override, overrides.filter(key=override.key, rule=override.rule))
    if other is not None:
        message = _("Override %(pk)s holds for the same key and rule at that time: end it first.")
        raise ValidationError({"key": message % {"pk": other.pk}})
