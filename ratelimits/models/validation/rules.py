"""Validation of a rule or an override. Each message says what to write instead. Most messages are errors of one field.

`Rule.clean` and `KeyOverride.clean` call these functions, so the admin and rules as code use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import ROUND_UP, Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import router
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.base import number
from ratelimits.algorithms.limits import ALGORITHMS, fields_of
from ratelimits.conf import conf
from ratelimits.engine.keys import name_id
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models.fields import view_key_texts
from ratelimits.models.fields.rule_fields import PARAMETERS, required_fields
from ratelimits.models.fields.scopes import SCOPE, names_in, split_scope
from ratelimits.models.fields.sentences import counted_per
from ratelimits.models.fields.validity import overlapping
from ratelimits.models.keys import COUNTED, COVERS
from ratelimits.models.users import groups_field
from ratelimits.models.validation.crowding import too_many

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ratelimits.models.overrides import KeyOverride
    from ratelimits.models.rules import Rule

Errors = dict[str, list[Any]]

#: By field: what to write if the value is missing or wrong.
_ADVICE = {
    "rate": _("Write how many permits are added again per period, such as 5."),
    "capacity": _("Write the maximum number of permits at once, such as 10. With 0 every request is refused."),
    "period": _("Write seconds, such as 60, or a number with its unit, such as 5 min, 1 h or 1 day."),
    "calendar_unit": _("Choose hour, day, week, month, year or billing period."),
}


def check_rule(rule: Rule, rules: QuerySet[Rule], overrides: QuerySet[KeyOverride]) -> None:
    """Raise ValidationError, with a message for each error, if the rule is not valid or does not fit the other rows."""
    errors = _parameter_errors(rule) or _override_errors(rule, overrides)
    errors |= _name_errors(rule, rules) | _billing_errors(rule, rules)
    if problem := rule.start_problem():
        errors["start_from_ledger"] = [problem]
    if problem := rule.lasting_problem():
        errors["lasting"] = [problem]
    errors |= billing_period_errors(rule)
    errors |= _coverage_errors(rule) | _prefetch_errors(rule) | _crowding_errors(rule, rules, overrides)
    if errors:
        raise ValidationError(errors)


def _parameter_errors(rule: Rule) -> Errors:
    """Return the errors in the algorithm's parameters. An empty parameter stands for its default and stays empty."""
    missing = [name for name in required_fields(rule.algorithm) if getattr(rule, name) in (None, "")]
    if missing:
        return {name: [_ADVICE[name]] for name in missing}
    try:
        algorithm = rule.to_algorithm()
    except ValueError as error:
        return _at_field(str(error)) | _not_above_zero(rule)
    if algorithm.needs_max_wait and rule.max_wait is None:
        wait = Decimal(1) if algorithm.suggested_max_wait is None else algorithm.suggested_max_wait
        suggestion = f"{wait.quantize(Decimal('0.000001'), ROUND_UP).normalize():f}"
        message = _("Write how many seconds a request is allowed to wait, such as %(suggestion)s.")
        return {"max_wait": [message % {"suggestion": suggestion}]}
    # A value of another type is reported by the field itself.
    if isinstance(rule.max_wait, Decimal | int) and rule.max_wait < 0:
        return {"max_wait": [_("Write 0 if no request is allowed to wait, or a number of seconds.")]}
    return {}


def _not_above_zero(rule: Rule) -> Errors:
    """Return an error for each number that must be above 0 but is not. The algorithm itself reports only the first."""
    values = {name: getattr(rule, name) for name in ("rate", "period") if name in fields_of(rule.algorithm)}
    return {
        name: [_("%(name)s must be above 0, not %(value)s.") % {"name": name, "value": number(value)}, _ADVICE[name]]
        for name, value in values.items()
        if isinstance(value, Decimal | int) and value <= 0
    }


def _at_field(message: str) -> Errors:
    """Return an algorithm's message as the error of one field. Most messages start with the name of the field."""
    first_word = re.split(r"\W", message, maxsplit=1)[0]
    if message.startswith("unknown time zone"):
        first_word = "timezone"
    elif "calendar_unit" in message:
        first_word = "calendar_unit"
    field = first_word if first_word in PARAMETERS else "algorithm"
    return {field: [f"{message}.", *([_ADVICE[field]] if field in _ADVICE else [])]}


def billing_period_errors(rule: Rule) -> Errors:
    """Return the errors of a rule that counts in billing periods: each of its keys must have one account."""
    try:
        if not rule.to_algorithm().follows_billing:
            return {}
    except (ValueError, TypeError, ArithmeticError):
        return {}  # The validation of the parameters reports this.
    of_account = {
        "timezone": _("Leave the time zone empty: a billing period is in the time zone of the account."),
        "anchor": _("Leave the anchor empty: a billing period starts at the billing anchor of the account."),
    }
    errors: Errors = {name: [message] for name, message in of_account.items() if getattr(rule, name)}
    if rule.key_kind not in ("account", "caller", "user", "api_key"):
        errors["key_kind"] = [
            _("Count per account, caller, user or API key, or choose a month: other keys have no billing period.")
        ]
    elif rule.key_kind not in _kinds_with_one_account():
        message = _(
            "Count per account, or set RATELIMITS['ONE_ACCOUNT_PER_KEY']: a key with several accounts has no billing"
            " period of its own."
        )
        errors["key_kind"] = [message]
    return errors


def _kinds_with_one_account() -> set[str]:
    """Return the kinds of keys that have the same account in all their requests."""
    if conf.ONE_ACCOUNT_PER_KEY:
        return {"account", "caller", "user", "api_key"}
    # Without the hook ACCOUNT, the account is the user, or else the API key. So only an API key that is used by several
    # users has several accounts, and a caller is an API key only in requests without a user.
    return {"account", "caller", "user"} if conf.ACCOUNT is None else {"account"}


def _override_errors(rule: Rule, overrides: QuerySet[KeyOverride]) -> Errors:
    """Return an error if an override of the rule would no longer be valid."""
    if rule._state.adding:
        return {}
    names, rows = overrides.model.NUMBERS, overrides.filter(rule=rule.name).order_by()
    for numbers in rows.values_list(*names).distinct():
        changes = {name: value for name, value in zip(names, numbers, strict=True) if value is not None}
        try:
            rule.with_numbers(changes)
        except ValueError as error:
            shown = ", ".join(f"{name} {number(value)}" for name, value in changes.items())
            message = _(
                "An override of this rule (%(shown)s) would no longer be valid: %(error)s. Change the override first."
            )
            return {"algorithm": [message % {"shown": shown, "error": error}]}
    return {}


def _coverage_errors(rule: Rule) -> Errors:
    """Return the errors in the fields that say which requests the rule covers, and how it counts addresses."""
    errors: Errors = {}
    excepted = names_in(rule.except_scopes)
    wrong = next((name for name in excepted if name == "*" or SCOPE.fullmatch(name) is None or ":" in name), None)
    if excepted and split_scope(rule.scope)[0] != "*":
        errors["except_scopes"] = [_("Leave this empty, or write * as the scope: only a rule for * has exceptions.")]
    elif wrong is not None:
        not_a_scope = _("%(name)s is not a scope: write scopes such as health, webhooks, without methods.")
        errors["except_scopes"] = [not_a_scope % {"name": wrong}]
    if rule.group and rule.callers == "anonymous":
        errors["group"] = [_("Leave this empty, or choose other callers: anonymous callers are in no group.")]
    elif rule.group and (unknown := group_problem(rule.group)):
        errors["group"] = [unknown]
    if rule.view_key and rule.key_kind != "view_key":
        errors["view_key"] = [_("Leave this empty, or count per key that the view gives.")]
    if rule.key_kind not in ("ip", "caller"):
        message = _("Leave this empty, or count per address or per caller: other rules count no addresses.")
        errors |= {name: [message] for name in ("ipv4_prefix", "ipv6_prefix") if getattr(rule, name) is not None}
    return errors


def group_problem(name: str) -> str:
    """Return a message if no group has this name, otherwise ""."""
    field = groups_field()
    if field is None:
        return str(_("Leave this empty: the users of this project have no groups."))
    groups = field.related_model
    names = sorted(groups._base_manager.using(router.db_for_write(groups)).values_list("name", flat=True))
    if name in names:
        return ""
    message = _("No group has the name %(name)s. These groups exist: %(names)s.")
    return str(message % {"name": name, "names": ", ".join(names[:20]) or "–"})


def _name_errors(rule: Rule, rules: QuerySet[Rule]) -> Errors:
    """Return an error if another rule's name has the same number in Redis."""
    others = rules.exclude(name=rule.name).order_by().values_list("name", flat=True).distinct()
    same_id = next((other for other in others if name_id(other) == name_id(rule.name)), None)
    if same_id is None:
        return {}
    message = _("Choose another name: “%(name)s” and “%(other)s” would have the same number in Redis (crc32).")
    return {"name": [message % {"name": rule.name, "other": same_id}]}


def _crowding_errors(rule: Rule, rules: QuerySet[Rule], overrides: QuerySet[KeyOverride]) -> Errors:
    crowd = too_many(rules.using(conf.DATABASE), overrides.using(conf.DATABASE), rule)
    if crowd is None:
        return {}
    message = _(
        "With this rule, %(count)s rules could apply to a request in scope “%(scope)s”. At most %(most)s"
        " rules may apply to one request. First switch other rules off, delete them, or give them other"
        " scopes."
    )
    return {NON_FIELD_ERRORS: [message % {"scope": crowd.scope, "count": crowd.rules, "most": MAX_LIMITS}]}


def _billing_errors(rule: Rule, rules: QuerySet[Rule]) -> Errors:
    """Return an error if another rule bills the same kind of key and meter, and can apply to the same requests."""
    if not rule.bills:
        return {}
    billing = rules.filter(bills=True, key_kind=rule.key_kind, meter=rule.meter)
    billing = billing.exclude(name=rule.name).exclude(pk=rule.pk)
    other = billing.filter(plan=rule.plan_id).first()
    message = _("“%(other)s” already bills %(meter)s %(counted_per)s: untick “bills” in one of the two rules.")
    if other is None:
        # The rules of a plan apply together with the default rules. But a plan's rule replaces the default rule of the
        # same name.
        message = _(
            "“%(other)s” bills %(meter)s %(counted_per)s for the same keys. Untick “bills” in one of the two"
            " rules. Or give both rules the same name, so that the plan's rule replaces the default rule."
        )
        if rule.plan_id is not None:
            replaced = rules.filter(plan=rule.plan_id).values("name")
            other = billing.filter(plan=None).exclude(name__in=replaced).first()
        else:
            replacing = rules.filter(name=rule.name).exclude(plan=None).values("plan")
            other = billing.exclude(plan=None).exclude(plan__in=replacing).first()
    if other is None:
        return {}
    shown = {"other": other, "meter": rule.meter, "counted_per": counted_per(rule.key_kind, rule.view_key)}
    return {"bills": [message % shown]}


def _prefetch_errors(rule: Rule) -> Errors:
    """Return an error if the rule has `prefetch` but its permits cannot be prefetched.

    Permits can be prefetched only if all permits of the rule become free again at the same moment.
    """
    if rule.prefetch is None:
        return {}
    if not _may_prefetch(rule):
        message = _(
            "Leave this empty, or choose a fixed window at fixed times of the clock or a calendar window. With any"
            " other algorithm, permits come back while a process still has prefetched permits. Together these permits"
            " would exceed the limit."
        )
    elif rule.prefetch < 1:
        message = _("Write 1 or more, or leave it empty.")
    else:
        return {}
    return {"prefetch": [message]}


def _may_prefetch(rule: Rule) -> bool:
    """Return whether the algorithm allows prefetching. An empty field stands for its default value."""
    where = ALGORITHMS[rule.algorithm].prefetch_where
    return where is not None and all(getattr(rule, name) in ("", *values) for name, values in where.items())


def check_override(override: KeyOverride, overrides: QuerySet[KeyOverride], rules: QuerySet[Rule]) -> None:
    """Do the same as `check_numbers`. Also raise ValidationError if another override is in force at the same time."""
    check_numbers(override, rules)
    _check_overlap(override, overrides)
    _check_crowding(override, overrides, rules)


def check_numbers(override: KeyOverride, rules: QuerySet[Rule]) -> None:
    """Raise ValidationError if the numbers of an override are not valid.

    The numbers are not valid if no rule has the name `override.rule`, if one of the rules with this name cannot use the
    numbers, or if the override changes nothing.
    """
    names = rules.order_by().values_list("name", flat=True).distinct()
    check_numbers_under(override, list(rules.filter(name=override.rule)), names)


def check_numbers_under(override: KeyOverride, rules: Sequence[Rule], all_names: Iterable[str]) -> None:
    """Do the same as `check_numbers`, without a query.

    `rules` are the rules with the name `override.rule`. `all_names` are the names of all rules, for the message.
    """
    changes = override.changes()
    if not changes and not override.mode:
        raise ValidationError(_("The override changes nothing: give a capacity, rate, period or mode."))
    if not rules:
        shown = ", ".join(islice(sorted(all_names), 20))
        message = _("No rule has this name. These rules exist: %(names)s.")
        raise ValidationError({"rule": message % {"names": shown or "–"}})
    if changes:
        for rule in rules:
            _check_numbers(override, rule, changes)


def _check_numbers(override: KeyOverride, rule: Rule, changes: dict[str, Any]) -> None:
    covered_kinds = COVERS.get(override.key.partition(":")[0])
    if covered_kinds is None:
        return  # The validation of the field reports an unknown kind.
    # A rule that names no key counts the first key of each view, and this can be the key of the override.
    counts_other = view_key_texts.is_text(override.key) and rule.view_key not in ("", override.key.partition("=")[0])
    if counts_other or not COUNTED[rule.key_kind] & covered_kinds:
        message = _(
            "%(rule)s counts %(counted_per)s, so other keys share the counter of %(key)s. The numbers cannot differ"
            " for only one of these keys. Override the mode instead, or the numbers of the key that is counted."
        )
        shown = {"rule": rule, "counted_per": counted_per(rule.key_kind, rule.view_key), "key": override.key}
        raise ValidationError(message % shown)
    try:
        rule.with_numbers(changes)
    except ValueError as error:
        field = next((name for name in changes if str(error).startswith(name)), next(iter(changes)))
        raise ValidationError({field: f"{error}."}) from error


def _check_crowding(override: KeyOverride, overrides: QuerySet[KeyOverride], rules: QuerySet[Rule]) -> None:
    """Raise ValidationError if the override switches on more rules than one request may have."""
    if override.mode in ("", "off") or not rules.filter(name=override.rule, mode="off").exists():
        return
    error = crowding_error(override.key, [override], overrides.using(conf.DATABASE), rules.using(conf.DATABASE))
    if error:
        raise ValidationError({"mode": error})


def crowding_error(
    key: str, edited: Sequence[KeyOverride], overrides: QuerySet[KeyOverride], rules: QuerySet[Rule]
) -> str:
    """Return an error message if too many rules could apply to a request of this key with these unsaved overrides."""
    crowd = too_many(rules, overrides, edited_overrides=edited, key=key)
    if crowd is None:
        return ""
    message = _(
        "With this override, %(count)s rules could apply to a request of %(key)s in scope “%(scope)s”. At most"
        " %(most)s rules may apply to one request. First switch other rules off, or delete them."
    )
    return message % {"count": crowd.rules, "key": key, "scope": crowd.scope, "most": MAX_LIMITS}


def _check_overlap(override: KeyOverride, overrides: QuerySet[KeyOverride]) -> None:
    other = overlapping(override, overrides.filter(key=override.key, rule=override.rule))
    if other is not None:
        message = _(
            "Override %(pk)s is in force for the same key and rule at the same time: end override %(pk)s first."
        )
        raise ValidationError({"key": message % {"pk": other.pk}})
