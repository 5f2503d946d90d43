"""Give a key more capacity under a rule until a given moment, by overrides that are valid until this moment."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.algorithms.limits import fields_of
from ratelimits.conf import conf
from ratelimits.models import KeyOverride, PlanMembership, Rule
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.history import MAX_REASON
from ratelimits.models.keys import canonical_key, refuse_secret
from ratelimits.models.versions import editing


def planned(key: str, rule: str, extra: int, until: datetime, *, account: str = "") -> list[KeyOverride]:
    """Return overrides that give a key `extra` more permits under a rule from now until `until`. Do not save them.

    If overrides of the key and rule are in force in this time, the returned overrides have the same numbers except the
    capacity. `account` is the identifier of the key's account; "" if it is not known. Raise ValidationError if no rule
    with this name applies to the key, if the rule has no capacity, if `extra` is below 1, or if `until` is in the past.
    """
    key, now, until = canonical_key(key), moments.now(), moments.read(until)
    refuse_secret(key)
    if extra < 1:
        raise ValidationError({"extra": _("Write how many permits to add: 1 or more.")})
    if until <= now:
        raise ValidationError({"until": _("Choose a moment in the future.")})
    base = _rule_of(key, rule, account)
    if "capacity" not in fields_of(base.algorithm) or base.capacity is None:
        text = _("%(rule)s has no capacity: override the rate of this rule instead.")
        raise ValidationError({"rule": text % {"rule": base}})
    existing = _overrides(key, rule, now, until)
    edges = {now, until}
    for row in existing:
        edges |= {edge for edge in (row.valid_from, row.valid_until) if edge is not None and now < edge < until}
    granted = []
    # The edges divide the time into parts. Make one override for each part.
    for start, end in pairwise(sorted(edges)):
        in_force = next((row for row in existing if _is_in_force(row, start)), None)
        override = KeyOverride(key=key, rule=rule) if in_force is None else _copy(in_force)
        override.capacity = (base.capacity if override.capacity is None else override.capacity) + extra
        override.valid_from, override.valid_until = start, end
        granted.append(override)
    return granted


def grant(
    key: str, rule: str, extra: int, until: datetime, reason: str, *, account: str = "", by: Any = None
) -> list[KeyOverride]:
    """Save the overrides of `planned`, in one edit. While these are in force, the existing overrides are not in force.

    `by` is the user who decided this. If it is None, the history of the overrides names no user.
    """
    key, until = canonical_key(key), moments.read(until)
    with editing(conf.DATABASE):
        granted = planned(key, rule, extra, until, account=account)
        start = granted[0].valid_from
        assert start is not None
        for row in _overrides(key, rule, start, until):
            _make_room(row, start, until, reason, by)
        for override in granted:
            override.reason = reason
            override.full_clean()
            _save(override, reason, by)
    return granted


def _make_room(row: KeyOverride, start: datetime, until: datetime, reason: str, by: Any) -> None:
    """Change an override so that it is in force only before `start` and after `until`."""
    later_row = None
    if row.valid_until is None or row.valid_until > until:
        later_row = _copy(row)
        later_row.valid_from, later_row.valid_until = until, row.valid_until
    if row.valid_from is None or row.valid_from < start:
        row.valid_until = start
        _save(row, reason, by)
    else:
        _describe(row, reason, by)
        row.delete(using=conf.DATABASE)
    if later_row is not None:
        _save(later_row, reason, by)


def _save(row: KeyOverride, reason: str, by: Any) -> None:
    _describe(row, reason, by)
    row.save(using=conf.DATABASE)


def _describe(row: Any, reason: str, by: Any) -> None:
    """Set the reason of this edit, and its user if `by` is not None. The row's history records both."""
    row._change_reason = reason[:MAX_REASON]
    if by is not None:
        row._history_user = by


def _copy(row: KeyOverride) -> KeyOverride:
    numbers = {name: getattr(row, name) for name in (*KeyOverride.NUMBERS, "mode", "reason")}
    return KeyOverride(key=row.key, rule=row.rule, **numbers)


def _is_in_force(row: KeyOverride, moment: datetime) -> bool:
    return (row.valid_from is None or row.valid_from <= moment) and (
        row.valid_until is None or moment < row.valid_until
    )


def _overrides(key: str, rule: str, start: datetime, until: datetime) -> Sequence[KeyOverride]:
    """Return the overrides of a key and rule that are in force at some moment from `start` to `until`."""
    rows = KeyOverride.objects.using(conf.DATABASE).filter(key=key, rule=rule)
    rows = rows.filter(Q(valid_from=None) | Q(valid_from__lt=until)).filter(
        Q(valid_until=None) | Q(valid_until__gt=start)
    )
    return list(rows.order_by("pk"))


def _rule_of(key: str, name: str, account: str) -> Rule:
    """Return the rule with this name that applies to a key. Raise ValidationError if there is no such rule.

    This is the rule of the key's plan, or else of its account's plan, or else the default rule.
    """
    now, using = moments.now(), conf.DATABASE
    rows = {row.plan_id: row for row in Rule.objects.using(using).select_related("plan").filter(name=name)}
    if not rows:
        raise ValidationError({"rule": _("No rule has the name “%(rule)s”.") % {"rule": name}})
    kind, _colon, identifier = key.partition(":")
    memberships = PlanMembership.objects.using(using).filter(key=key)
    memberships = memberships.filter(Q(valid_from=None) | Q(valid_from__lte=now)).filter(
        Q(valid_until=None) | Q(valid_until__gt=now)
    )
    plans: list[int | None] = list(memberships.values_list("plan", flat=True))
    owner = identifier if kind == "account" else account
    if owner:
        plans += [row.plan_id for row in accounts_now(using, [owner]).values()]
    for plan in (*plans, None):
        if plan in rows:
            return rows[plan]
    text = _(
        "No rule “%(rule)s” applies to %(key)s: all rules with this name belong to plans, and the key is"
        " on none of these plans."
    )
    raise ValidationError({"rule": text % {"rule": name, "key": key}})
