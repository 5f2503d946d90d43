"""Evaluating: accounts whose totals have moved are looked at, and what has reached a threshold becomes an alert, once.

An alert and its deliveries are one transaction. How far the totals were looked at is written last: an evaluation that
dies before it is made again, and finds in the database what was raised already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import or_

from django.db import IntegrityError, transaction
from django.db.models import Q, Sum
from django.utils import timezone

from ratelimits import rules
from ratelimits.alerts.quantities import AccountUsage, Measure, MonthlyLimits, included
from ratelimits.conf import conf
from ratelimits.models import (
    Alert,
    AlertChannel,
    AlertDelivery,
    AlertState,
    ConfigVersion,
    PeriodUsage,
    ShardState,
)
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms import Terms, TermsBook
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

#: Billing periods that started so long ago (s) are over, whatever their account's anchor is.
_OLDEST = 93 * 86_400
_ACCOUNTS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Behind:
    """A shard whose totals are to be looked at: those behind a position, up to another."""

    shard: int
    after: int
    until: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one evaluation goes by; moments in µs since 1970 UTC."""

    using: str
    thresholds: tuple[int, ...]
    now: int
    since: int
    terms: TermsBook
    limits: MonthlyLimits
    rules: Mapping[int, str]


#: The largest quantity of which each threshold was said to be reached, by account, period, meter, percent and rule.
_Said = dict[tuple[str, int, str, int, int], int]


def evaluate(now: int | None = None) -> list[Alert]:
    """Raise the alerts that are due by the ledger's totals; doing it again, or at once elsewhere, raises none twice.

    `now` is µs since 1970 UTC, by default this machine's clock. Raises rules.RulesUnavailable when the rules cannot be
    had.
    """
    using, thresholds = conf.DATABASE, tuple(sorted(set(conf.ALERT_THRESHOLDS)))
    now = time.time_ns() // 1000 if now is None else now
    # Read before what it says something about, so that whatever comes later is looked at once more.
    version = ConfigVersion.read(using)[0]
    terms = f"{version}:{','.join(map(str, thresholds))}"[:200]
    behind = _behind(using, terms, now)
    if not behind or not thresholds:
        return []
    snapshot = rules.reload(version)
    names = {pk: row.name for pk, row in snapshot.rows.rules.items()}
    since = min(AlertState.objects.using(using).values_list("since", flat=True))
    this = _Pass(using, thresholds, now, since, TermsBook(using), MonthlyLimits(using, snapshot), names)
    raised: list[Alert] = []
    accounts = _touched(using, behind, now)
    while chunk := list(islice(accounts, _ACCOUNTS_AT_ONCE)):
        raised += _evaluate(this, chunk)
    crash.reached("alerts:evaluated")
    for each in behind:
        AlertState.objects.using(using).filter(shard=each.shard, position__lte=each.until).update(
            position=each.until, terms=terms
        )
    return raised


def _behind(using: str, terms: str, now: int) -> list[Behind]:
    tallied = dict(ShardState.objects.using(using).values_list("shard", "tallied"))
    states = AlertState.objects.using(using).in_bulk()
    new = tallied.keys() - states.keys()
    if new:
        AlertState.objects.using(using).bulk_create(
            [AlertState(shard=shard, since=now) for shard in sorted(new)], ignore_conflicts=True
        )
        states = AlertState.objects.using(using).in_bulk()
    behind = []
    for shard, until in tallied.items():
        state = states[shard]
        # Other plans, rules or thresholds: every account's share may be another one.
        after = state.position if state.terms == terms else 0
        if until > after:
            behind.append(Behind(shard, after, until))
    return behind


def _touched(using: str, behind: Sequence[Behind], now: int) -> Iterator[str]:
    """The accounts whose totals have moved, in their order."""
    moved = reduce(or_, (Q(shard=each.shard, position__gt=each.after) for each in behind))
    rows = PeriodUsage.objects.using(using).filter(moved, period__gt=now // SECOND - _OLDEST).exclude(account="")
    return rows.order_by("account").values_list("account", flat=True).distinct().iterator()


def _evaluate(this: _Pass, accounts: list[str]) -> list[Alert]:
    oldest = this.now // SECOND - _OLDEST
    rows = PeriodUsage.objects.using(this.using).filter(account__in=accounts, period__gt=oldest).order_by()
    totals = rows.values_list("account", "period", "meter", "rule").annotate(
        used=Sum("admitted_units") - Sum("refunded_units")
    )
    by_meter: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    for account, period, meter, rule, used in totals:
        by_meter.setdefault((account, period, meter), []).append((rule, used))
    said = _said(this, accounts, oldest)
    terms = this.terms.of(accounts)
    raised: list[Alert] = []
    for (account, start, meter), found in sorted(by_meter.items()):
        held = terms[account]
        period = held.period_from(start * SECOND)
        if period.end > this.since:
            usages = [AccountUsage(account, meter, rule, period, used) for rule, used in sorted(found)]
            raised += _raise_for(this, usages, held, said)
    return raised


def _said(this: _Pass, accounts: list[str], oldest: int) -> _Said:
    said: _Said = {}
    for alert in Alert.objects.using(this.using).filter(account__in=accounts, period__gt=oldest).iterator():
        _note(said, alert)
    return said


def _note(said: _Said, alert: Alert) -> None:
    # All rules together use up what a plan includes, so it is no rule's.
    rule = 0 if alert.basis == Alert.Basis.INCLUDED else alert.rule
    about = alert.account, alert.period, alert.meter, alert.threshold, rule
    said[about] = max(said.get(about, 0), alert.quantity)


def _raise_for(this: _Pass, usages: Sequence[AccountUsage], terms: Terms, said: _Said) -> Iterator[Alert]:
    total = sum(usage.used for usage in usages)
    for usage in usages:
        measures = [
            *included(total, terms.included.get(usage.meter, 0)),
            *this.limits.measures(usage, this.thresholds[0]),
        ]
        most = max(measures, key=lambda measure: measure.share, default=None)
        if most is None:
            continue
        about = usage.account, usage.period.start // SECOND, usage.meter
        for percent in filter(most.reaches, this.thresholds):
            # Said of as much or more, it holds for this quantity too; said of less, before an upgrade, it does not.
            if max(said.get((*about, percent, rule), 0) for rule in (0, usage.rule)) < most.quantity:
                alert = _alert(this, usage, most, percent)
                if _write(this.using, alert):
                    yield alert
                _note(said, alert)


def _alert(this: _Pass, usage: AccountUsage, measure: Measure, percent: int) -> Alert:
    start = usage.period.start // SECOND
    rule = 0 if measure.basis == Alert.Basis.INCLUDED else usage.rule
    return Alert(
        id=Alert.name_of(usage.account, start, usage.meter, rule, percent, measure.quantity),
        account=usage.account,
        meter=usage.meter,
        rule=rule,
        rule_name=this.rules.get(rule, ""),
        key=measure.key,
        period=start,
        period_end=usage.period.end // SECOND,
        threshold=percent,
        basis=measure.basis,
        used=measure.used,
        quantity=measure.quantity,
    )


def _write(using: str, alert: Alert) -> bool:
    """Write an alert and all its deliveries; False when it, or one that says the same, is there already."""
    channels = AlertChannel.objects.using(using).filter(account__identifier=alert.account, active=True)
    try:
        with transaction.atomic(using=using, durable=True):
            alert.save(using=using, force_insert=True)
            crash.reached("alerts:alert-written")
            AlertDelivery.objects.using(using).bulk_create(_deliveries(alert, channels))
            crash.reached("alerts:deliveries-written")
    except IntegrityError:
        if Alert.objects.using(using).filter(pk=alert.pk).exists():
            return False
        raise
    crash.reached("alerts:committed")
    logger.info("account %s has used %s %% of %s %s", alert.account, alert.threshold, alert.quantity, alert.meter)
    return True


def _deliveries(alert: Alert, channels: Iterable[AlertChannel]) -> Iterator[AlertDelivery]:
    ways: list[tuple[AlertDelivery.Kind, AlertChannel | None]] = [(AlertDelivery.Kind.SIGNAL, None)]
    for channel in channels:
        if channel.email:
            ways.append((AlertDelivery.Kind.EMAIL, channel))
        if channel.webhook_url:
            ways.append((AlertDelivery.Kind.WEBHOOK, channel))
    for kind, way in ways:
        name = AlertDelivery.name_of(alert.pk, kind, way.pk if way is not None else None)
        yield AlertDelivery(id=name, alert=alert, kind=kind, channel=way, due_at=timezone.now())
