"""Give a key more capacity under a rule until some moment, by overrides that are valid until then."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from ratelimits.algorithms.limits import fields_of
from ratelimits.conf import conf
from ratelimits.models import Account, KeyOverride, PlanMembership, Rule
from ratelimits.models.history import MAX_REASON
from ratelimits.models.versions import editing


def planned(key: str, rule: str, extra: int, until: datetime, *, account: str = "") -> list[KeyOverride]:
    """Return unsaved overrides that give a key `extra` more capacity under a rule from now until `until`.

    If the key has an override already, its other numbers are kept. Raise ValidationError if there is no such rule, if
    it has no capacity, or if `until` is in the past.
    """
    now = timezone.now()
    if extra < 1:
        raise ValidationError({"extra": _("Write how many permits to add: 1 or more.")})
    if until <= now:
        raise ValidationError({"until": _("Choose a moment in the future.")})
    base = _rule_of(key, rule, account)
    if "capacity" not in fields_of(base.algorithm) or base.capacity is None:
        text = _("%(rule)s has no capacity to add to: override its rate instead.")
        raise ValidationError({"rule": text % {"rule": base}})
    before = _overrides(key, rule, now, until)
    edges = {now, until}
    for one in before:
        edges |= {edge for edge in (one.valid_from, one.valid_until) if edge is not None and now < edge < until}
    ordered = sorted(edges)
    granted = []
    for start, end in pairwise(ordered):
        own = next((one for one in before if _covers(one, start)), None)
        override = KeyOverride(key=key, rule=rule) if own is None else _copy(own)
        override.capacity = (base.capacity if override.capacity is None else override.capacity) + extra
        override.valid_from, override.valid_until = start, end
        granted.append(override)
    return granted


def grant(
    key: str, rule: str, extra: int, until: datetime, reason: str, *, account: str = "", by: Any = None
) -> list[KeyOverride]:
    """Save the overrides of `planned`, in one edit. Existing overrides are interrupted for this time."""
    with editing(conf.DATABASE):
        granted = planned(key, rule, extra, until, account=account)
        start = granted[0].valid_from
        assert start is not None
        for one in _overrides(key, rule, start, until):
            _make_room(one, start, until, reason, by)
        for override in granted:
            override.reason = reason
            override.full_clean()
            _save(override, reason, by)
    return granted


def _make_room(row: KeyOverride, start: datetime, until: datetime, reason: str, by: Any) -> None:
    """Change an override so that it is in force only before `start` and after `until`."""
    after = None
    if row.valid_until is None or row.valid_until > until:
        after = _copy(row)
        after.valid_from, after.valid_until = until, row.valid_until
    if row.valid_from is None or row.valid_from < start:
        row.valid_until = start
        _save(row, reason, by)
    else:
        _describe(row, reason, by)
        row.delete(using=conf.DATABASE)
    if after is not None:
        _save(after, reason, by)


def _save(row: KeyOverride, reason: str, by: Any) -> None:
    _describe(row, reason, by)
    row.save(using=conf.DATABASE)


def _describe(row: Any, reason: str, by: Any) -> None:
    """Set the reason, and the user if there is one, that the row's history records."""
    row._change_reason = reason[:MAX_REASON]
    if by is not None:
        row._history_user = by


def _copy(row: KeyOverride) -> KeyOverride:
    numbers = {name: getattr(row, name) for name in (*KeyOverride.NUMBERS, "mode", "reason")}
    return KeyOverride(key=row.key, rule=row.rule, **numbers)


def _covers(row: KeyOverride, at: datetime) -> bool:
    return (row.valid_from is None or row.valid_from <= at) and (row.valid_until is None or at < row.valid_until)


def _overrides(key: str, rule: str, start: datetime, until: datetime) -> Sequence[KeyOverride]:
    """Return the overrides that are in force at some time between two moments."""
    rows = KeyOverride.objects.using(conf.DATABASE).filter(key=key, rule=rule)
    rows = rows.filter(Q(valid_from=None) | Q(valid_from__lt=until)).filter(
        Q(valid_until=None) | Q(valid_until__gt=start)
    )
    return list(rows.order_by("pk"))


def _rule_of(key: str, name: str, account: str) -> Rule:
    """Return the rule with this name that applies to a key.

    It is the rule of the key's plan, or else of its account's plan, or else the default rule.
    """
    now, using = timezone.now(), conf.DATABASE
    rows = {row.plan_id: row for row in Rule.objects.using(using).select_related("plan").filter(name=name)}
    if not rows:
        raise ValidationError({"rule": _("No rule has the name “%(rule)s”.") % {"rule": name}})
    kind, _colon, identifier = key.partition(":")
    joined = PlanMembership.objects.using(using).filter(key=key)
    joined = joined.filter(Q(valid_from=None) | Q(valid_from__lte=now)).filter(
        Q(valid_until=None) | Q(valid_until__gt=now)
    )
    plans = list(joined.values_list("plan", flat=True))
    owner = identifier if kind == "account" else account
    plans += Account.objects.using(using).filter(identifier=owner).values_list("plan", flat=True) if owner else []
    for plan in (*plans, None):
        if plan in rows:
            return rows[plan]
    text = _("No rule “%(rule)s” applies to %(key)s: it is only in plans that the key is not on.")
    raise ValidationError({"rule": text % {"rule": name, "key": key}})
