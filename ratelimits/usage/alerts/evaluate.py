"""Evaluate thresholds: raise an alert when a customer's usage reaches a percentage of its quota.

The quantities that count as 100 percent are a plan's included quantity, and a rule's monthly limit.

An alert and its deliveries are written in one transaction. When all alerts are written, the position of the last
evaluated batch is written too. If the process dies before this, the evaluation is repeated. The repetition does not
raise alerts that exist already.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import groupby, islice
from operator import or_

from django.db import IntegrityError, InterfaceError, OperationalError, transaction
from django.db.models import Min, Q, Sum

from ratelimits import moments, rules
from ratelimits.algorithms.billing_periods import Period
from ratelimits.algorithms.limits import Algorithm, Mode
from ratelimits.conf import conf
from ratelimits.identity import Identity, user_of_account
from ratelimits.models import ConfigVersion, KeyOverride
from ratelimits.models.accounts.named import NamedCustomer, named
from ratelimits.rules import Snapshot
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.terms import Terms, TermsBook
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery, AlertState, Line, PeriodUsage, ShardState
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum, is_overflow
from ratelimits.usage.periods import SECOND, in_spans

logger = logging.getLogger(__name__)

#: A billing period that started longer ago than this (s) has ended. It is not evaluated.
_MAX_AGE = 93 * 86_400
#: How many customers are evaluated together.
_CHUNK = 500
#: A rule's window and a billing period are the same month if their starts and their ends differ by at most this (µs).
#: A difference is allowed, because the time zones of the rule and of the account can differ.
_MAX_DIFFERENCE = 86_400 * SECOND
#: If a rule does not count per account, at most this number of the account's keys can get alerts: those with the most
#: usage.
_MAX_KEYS = 100
#: The units of lines that count.
_USED = Sum("admitted_units") - Sum("refunded_units")


@dataclass(frozen=True, slots=True)
class ChangedShard:
    """A shard with totals that must be evaluated. Batches at positions `after` + 1 to `until` changed the totals."""

    shard: int
    after: int
    until: int


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The values that stay the same during one evaluation. Moments are in µs since 1970 UTC."""

    using: str
    #: Percentages, the lowest first.
    thresholds: tuple[int, ...]
    now: int
    #: The moment of the first evaluation. Periods that had ended before this moment get no alerts.
    since: int
    terms: TermsBook
    limits: MonthlyLimits
    #: The names of the rules, by primary key.
    rule_names: Mapping[int, str]


#: The largest quantity for which an alert exists, by token of the customer, period, meter, percent and rule. Rule 0
#: stands for the plan's included quantity.
_LargestQuantities = dict[tuple[str, int, str, int, int], int]


def evaluate(now: int | None = None) -> list[Alert]:
    """Raise an alert for each threshold that a customer has newly reached, and return the alerts.

    No alert is raised twice, even if two processes evaluate at the same time. `now` is in µs since 1970 UTC; the
    default is the time of this machine. Raise `rules.RulesUnavailable` if the rules cannot be read.
    """
    using, thresholds = conf.DATABASE, tuple(sorted(set(conf.ALERT_THRESHOLDS)))
    now = time.time_ns() // 1000 if now is None else now
    # Read the version first. If the configuration changes after this line, the next evaluation sees a newer version and
    # evaluates all accounts again.
    version = ConfigVersion.read(using)[0]
    version_and_thresholds = f"{version}:{','.join(map(str, thresholds))}"[:200]  # the length of the column
    shards = _changed_shards(using, version_and_thresholds, now)
    if not shards or not thresholds:
        return []
    snapshot = rules.reload(version)
    names = {pk: row.name for pk, row in snapshot.rows.rules.items()}
    since = min(AlertState.objects.using(using).values_list("since", flat=True))
    evaluation = _Evaluation(using, thresholds, now, since, TermsBook(using), MonthlyLimits(using, snapshot), names)
    raised: list[Alert] = []
    customers = _changed_customers(using, shards, now)
    while chunk := list(islice(customers, _CHUNK)):
        raised += _evaluate(evaluation, named(using, chunk))
    crash.reached("alerts:evaluated")
    for changed in shards:
        AlertState.objects.using(using).filter(shard=changed.shard, position__lte=changed.until).update(
            position=changed.until, terms=version_and_thresholds
        )
    return raised


def _changed_shards(using: str, version_and_thresholds: str, now: int) -> list[ChangedShard]:
    """Return the shards with usage that was not evaluated yet with this version and these thresholds."""
    tallied = dict(ShardState.objects.using(using).values_list("shard", "tallied"))
    states = AlertState.objects.using(using).in_bulk()
    new_shards = tallied.keys() - states.keys()
    if new_shards:
        AlertState.objects.using(using).bulk_create(
            [AlertState(shard=shard, since=now) for shard in sorted(new_shards)], ignore_conflicts=True
        )
        states = AlertState.objects.using(using).in_bulk()
    changed = []
    for shard, until in tallied.items():
        state = states[shard]
        # If plans, rules or thresholds have changed, evaluate every account again.
        after = state.position if state.terms == version_and_thresholds else 0
        if until > after:
            changed.append(ChangedShard(shard, after, until))
    return changed


def _changed_customers(using: str, shards: Sequence[ChangedShard], now: int) -> Iterator[int]:
    """Return the primary keys of the customers with changed totals."""
    changed = reduce(or_, (Q(shard=changed_shard.shard, position__gt=changed_shard.after) for changed_shard in shards))
    rows = PeriodUsage.objects.using(using).filter(changed, period__gt=now // SECOND - _MAX_AGE).exclude(account="")
    return rows.order_by("customer").values_list("customer", flat=True).distinct().iterator()


def _evaluate(evaluation: _Evaluation, customers: list[NamedCustomer]) -> list[Alert]:
    """Raise the alerts of these customers and return them."""
    oldest = evaluation.now // SECOND - _MAX_AGE
    pks = [customer.pk for customer in customers]
    rows = PeriodUsage.objects.using(evaluation.using).filter(customer__in=pks, period__gt=oldest).order_by()
    totals = rows.values_list("customer", "period", "meter", "rule", "account").annotate(
        ExactSum("admitted_units"), ExactSum("refunded_units")
    )
    by_meter: dict[tuple[int, int, str], list[tuple[int, str, int]]] = {}
    for pk, start, meter, rule, account, admitted, refunded in totals:
        by_meter.setdefault((pk, start, meter), []).append((rule, account, admitted - refunded))
    existing = _existing(evaluation, pks, oldest)
    terms = evaluation.terms.of_customers(customers)
    raised: list[Alert] = []
    by_pk = {customer.pk: customer for customer in customers}
    for pk, start, meter in sorted(by_meter, key=lambda subject: (by_pk[subject[0]], *subject[1:])):
        customer = by_pk[pk]
        try:
            period = terms[customer.token].period(start * SECOND)
            if period.end > evaluation.since:
                usages = [
                    AccountUsage(customer, account, meter, rule, period, used)
                    for rule, account, used in sorted(by_meter[pk, start, meter])
                ]
                raised += _raise_for(evaluation, usages, terms[customer.token], existing)
        except Exception as error:
            if isinstance(error, OperationalError | InterfaceError) and not is_overflow(error):
                raise  # The database failed, not this customer.
            logger.exception("Alerts of account %r cannot be raised; those of other accounts are", customer.account)
    return raised


def _existing(evaluation: _Evaluation, pks: Sequence[int | None], oldest: int) -> _LargestQuantities:
    """Return the largest quantities for which these customers have alerts, in periods that started after `oldest`."""
    existing: _LargestQuantities = {}
    alerts = Alert.objects.using(evaluation.using).filter(customer__in=pks, period__gt=oldest)
    for alert in alerts.select_related("customer").iterator():
        _add(existing, alert, alert.customer.token)
    return existing


def _add(existing: _LargestQuantities, alert: Alert, token: str) -> None:
    """Add the quantity of an alert to `existing`."""
    # Usage under any rule counts towards the included quantity. So an alert about the included quantity names no rule.
    rule = 0 if alert.basis == Alert.Basis.INCLUDED else alert.rule
    subject = token, alert.period, alert.meter, alert.threshold, rule
    existing[subject] = max(existing.get(subject, 0), alert.quantity)


def _raise_for(
    evaluation: _Evaluation, usages: Sequence[AccountUsage], terms: Terms, existing: _LargestQuantities
) -> Iterator[Alert]:
    """Raise and yield the alerts of one customer, billing period and meter.

    `usages` has the usage under each rule and account, sorted by rule. Of the quotas of a rule, only the one that is
    used up the most, in percent, raises alerts.
    """
    total = sum(usage.used for usage in usages)
    for _rule, group in groupby(usages, key=lambda usage: usage.rule):
        of_rule = list(group)
        usage = of_rule[0]
        quotas = [*included(total, terms.included.get(usage.meter, 0))]
        for each in of_rule:
            quotas += evaluation.limits.quotas(each, evaluation.thresholds[0])
        highest = max(quotas, key=lambda quota: quota.share, default=None)
        if highest is None:
            continue
        subject = usage.customer.token, usage.period.start // SECOND, usage.meter
        for percent in filter(highest.reaches, evaluation.thresholds):
            # Earlier alerts were about the included quantity (rule 0) or about the limit of this rule.
            largest_alerted = max(existing.get((*subject, percent, rule), 0) for rule in (0, usage.rule))
            # After an upgrade of the plan, the same percentage means a larger quantity, so a new alert is raised.
            if largest_alerted < highest.quantity:
                alert = _alert(evaluation, usage, highest, percent)
                if _write(evaluation.using, alert, usage.customer):
                    yield alert
                _add(existing, alert, usage.customer.token)


def _alert(evaluation: _Evaluation, usage: AccountUsage, quota: UsedQuota, percent: int) -> Alert:
    start, pk = usage.period.start // SECOND, usage.customer.pk
    assert pk is not None
    rule = 0 if quota.basis == Alert.Basis.INCLUDED else usage.rule
    return Alert(
        id=Alert.id_of(usage.customer.token, start, usage.meter, rule, percent, quota.quantity),
        customer_id=pk,
        account=usage.customer.account,
        meter=usage.meter,
        rule=rule,
        rule_name=evaluation.rule_names.get(rule, ""),
        key=quota.key,
        period=start,
        period_end=usage.period.end // SECOND,
        threshold=percent,
        basis=quota.basis,
        used=min(quota.used, MAX_TOTAL),
        quantity=quota.quantity,
    )


def _write(using: str, alert: Alert, customer: NamedCustomer) -> bool:
    """Write an alert and its deliveries in one transaction; return False if the alert exists already."""
    channels = AlertChannel.objects.using(using).filter(account__identifier__in=customer.present, active=True)
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
    destinations: list[tuple[AlertDelivery.Kind, AlertChannel | None]] = [(AlertDelivery.Kind.SIGNAL, None)]
    for channel in channels:
        if channel.email:
            destinations.append((AlertDelivery.Kind.EMAIL, channel))
        if channel.webhook_url:
            destinations.append((AlertDelivery.Kind.WEBHOOK, channel))
    for kind, target in destinations:
        delivery_id = AlertDelivery.id_of(alert.pk, kind, target.pk if target is not None else None)
        yield AlertDelivery(id=delivery_id, alert=alert, kind=kind, channel=target, due_at=moments.now())


@dataclass(frozen=True, slots=True)
class UsedQuota:
    """A quantity that counts as 100 percent for alerts, and how many of its units were used.

    `key` is the key that the limit belongs to. `key` is "" if the quantity belongs to the whole account or to its plan.
    """

    basis: Alert.Basis
    used: int
    quantity: int
    key: str = ""

    @property
    def share(self) -> Fraction:
        return Fraction(self.used, self.quantity)

    def reaches(self, percent: int) -> bool:
        """Return whether at least this percentage is used."""
        return self.used * 100 >= self.quantity * percent


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """How many units of a meter a customer has used under one of its accounts, in a billing period and under one rule.

    `rule` 0 means no rule. Limits count each account by itself.
    """

    customer: NamedCustomer
    account: str
    meter: str
    rule: int
    period: Period
    used: int


def included(used: int, quantity: int) -> Iterator[UsedQuota]:
    """Yield the plan's included quantity as a quota, if the quantity is above 0."""
    if quantity > 0:
        yield UsedQuota(Alert.Basis.INCLUDED, used, quantity)


class MonthlyLimits:
    """The limits per billing period or calendar month. No other limit can be compared with a billing period's usage."""

    def __init__(self, using: str, snapshot: Snapshot) -> None:
        self._using = using
        self._snapshot = snapshot
        self._smallest_overrides: dict[str, int | None] = {}

    def quotas(self, usage: AccountUsage, lowest_percent: int) -> Iterator[UsedQuota]:
        """Yield the quota of the account under the rule of `usage`, or one quota for each of the account's keys.

        A rule that counts per account has one quota. Limits that are not enforced have none. Quotas of keys are yielded
        only if the whole account has used at least `lowest_percent` of the smallest limit of a key under the rule. (So
        a key that is used with a thousand accounts gives no alerts to those that hardly use it.)
        """
        row = self._snapshot.rows.rules.get(usage.rule)
        if row is None or row.algorithm is None or not _may_limit_a_period(row.algorithm, usage.period):
            return
        if row.key_kind == "account":
            key = f"account:{usage.account}"
            is_only = usage.account == usage.customer.account
            yield from self._quotas_of(Identity(account=key), usage, usage.used, key="" if is_only else key)
        elif row.key_kind in ("caller", "user") and (user := user_of_account(usage.account)):
            # The user is the account, so the rule counts all of its usage. The ledger has a part under its API keys.
            used = usage.used + self._used_elsewhere(usage, [user]).get(user, 0)
            yield from self._quotas_of(Identity(user, account=f"account:{usage.account}"), usage, used, user)
        elif row.key_kind in ("caller", "api_key", "user"):
            capacity, _length = row.algorithm.quota
            smallest_limit = min(capacity, self._smallest_override(row.name) or capacity)
            if usage.used * 100 >= smallest_limit * lowest_percent:
                for key, used in self._usage_by_key(usage):
                    yield from self._quotas_of(_identity_of_key(usage.account, key), usage, used, key)

    def _quotas_of(self, identity: Identity, usage: AccountUsage, used: int, key: str) -> Iterator[UsedQuota]:
        """Yield the quota of an identity under the rule of `usage`. `used` is the usage of this identity alone."""
        row = self._snapshot.rows.rules[usage.rule]
        # If the rule limits only some HTTP methods, any one of them finds the rule.
        applied = self._snapshot.applicable(row.scope, min(row.methods, default=""), identity)
        for rule in applied:
            if rule.rule != usage.rule or rule.mode is not Mode.ENFORCE:
                continue
            capacity, _length = rule.algorithm.quota
            if capacity > 0 and _limits_period(rule.algorithm, usage.period):
                yield UsedQuota(Alert.Basis.LIMIT, used, capacity, key)

    def _smallest_override(self, name: str) -> int | None:
        """Return the smallest capacity in the overrides of a rule; None if no override has a capacity above 0."""
        if name not in self._smallest_overrides:
            # A capacity of 0 has no percentage and gives no alert, so it is left out.
            rows = KeyOverride.objects.using(self._using).filter(rule=name, capacity__gt=0)
            self._smallest_overrides[name] = rows.aggregate(least=Min("capacity"))["least"]
        return self._smallest_overrides[name]

    def _usage_by_key(self, usage: AccountUsage) -> list[tuple[str, int]]:
        """Return the account's keys with the most usage under the rule, each with its usage in units."""
        spans = usage.customer.spans(usage.period.start, usage.period.end)
        rows = Line.objects.using(self._using).filter(in_spans(span for span in spans if span.text == usage.account))
        keys = rows.filter(meter=usage.meter, rule=usage.rule).values_list("key").order_by()
        sums = list(keys.annotate(used=_USED).order_by("-used", "key")[:_MAX_KEYS])
        elsewhere = self._used_elsewhere(usage, [key for key, _used in sums])
        return [(key, used + elsewhere.get(key, 0)) for key, used in sums]

    def _used_elsewhere(self, usage: AccountUsage, keys: Sequence[str]) -> dict[str, int]:
        """Return the units that these keys have used with other accounts: a key has one limit for all its accounts."""
        if conf.ONE_ACCOUNT_PER_KEY:
            return {}
        first, end = usage.period.start // SECOND, usage.period.end // SECOND
        rows = Line.objects.using(self._using).filter(key__in=keys, bin__gte=first, bin__lt=end)
        rows = rows.filter(meter=usage.meter, rule=usage.rule).exclude(account=usage.account)
        return dict(rows.values_list("key").order_by().annotate(used=_USED))


def _identity_of_key(account: str, key: str) -> Identity:
    account_key = f"account:{account}"
    if key.startswith("user:"):
        return Identity(user=key, account=account_key)
    return Identity(api_key=key, account=account_key)


def _may_limit_a_period(algorithm: Algorithm, period: Period) -> bool:
    """Return whether an algorithm counts in billing periods or in months."""
    return algorithm.follows_billing or algorithm.month_at(period.start) is not None


def _limits_period(algorithm: Algorithm, period: Period) -> bool:
    """Return whether an algorithm limits the billing period itself, or its month.

    The time zone of a month and the time zone of the period can differ.
    """
    if algorithm.follows_billing:
        return True
    # The middle of the billing period is in the right month in every time zone.
    month = algorithm.month_at((period.start + period.end) // 2)
    if month is None:
        return False
    start, end = month
    return abs(start - period.start) <= _MAX_DIFFERENCE and abs(end - period.end) <= _MAX_DIFFERENCE
