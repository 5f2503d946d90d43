"""The quantities that count as 100 percent for alerts: a plan's included quantity, and a rule's monthly limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from django.db.models import Min, Sum

from ratelimits.algorithms.billing_periods import Period
from ratelimits.algorithms.limits import Algorithm, Mode
from ratelimits.conf import conf
from ratelimits.identity import Identity, user_of_account
from ratelimits.models import Alert, KeyOverride, Line
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.reports.periods import SECOND, in_spans
from ratelimits.rules import Snapshot

#: A rule's window and a billing period are the same month if their starts and their ends differ by at most this (µs).
#: A difference is allowed, because the time zones of the rule and of the account can differ.
_MAX_DIFFERENCE = 86_400 * SECOND
#: If a rule does not count per account, at most this number of the account's keys can get alerts: those with the most
#: usage.
_MAX_KEYS = 100
#: The units of lines that count.
_USED = Sum("admitted_units") - Sum("refunded_units")


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
