"""What 100 percent is: the quantity that an account's plan includes, or the limit of the rule that bills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from django.db.models import Min, Sum

from ratelimits.algorithms.limits import Algorithm
from ratelimits.identity import Identity
from ratelimits.models import Alert, KeyOverride, Line
from ratelimits.reports.periods import SECOND, Period
from ratelimits.rules import Snapshot

#: A window of a rule and a billing period that start and end this close (µs) are one: they differ in time zone only.
_APART = 86_400 * SECOND
#: Keys of an account that are looked at under a rule that limits each key, those with most usage first.
_KEYS = 100


@dataclass(frozen=True, slots=True)
class Measure:
    """How much was used of a quantity, in units of the meter; `key` is whose limit it is, "" the account's own."""

    basis: Alert.Basis
    used: int
    quantity: int
    key: str = ""

    @property
    def share(self) -> Fraction:
        return Fraction(self.used, self.quantity)

    def reaches(self, percent: int) -> bool:
        """Whether so many percent are used."""
        return self.used * 100 >= self.quantity * percent


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """An account's total in one meter under one rule (0: none) in a billing period, in units."""

    account: str
    meter: str
    rule: int
    period: Period
    used: int


def included(used: int, quantity: int) -> Iterator[Measure]:
    """The share of what the plan includes; nothing where it includes nothing."""
    if quantity > 0:
        yield Measure(Alert.Basis.INCLUDED, used, quantity)


class MonthlyLimits:
    """The limits that can be compared with a billing period's usage: capacities per calendar month."""

    def __init__(self, using: str, snapshot: Snapshot) -> None:
        self._using = using
        self._snapshot = snapshot
        self._smallest: dict[str, int | None] = {}

    def measures(self, usage: AccountUsage, lowest: int) -> Iterator[Measure]:
        """The shares used of the limits of this rule: the account's, or those of its keys.

        Keys are looked at only when the account as a whole has used `lowest` percent of what one key may.
        """
        row = self._snapshot.rows.rules.get(usage.rule)
        if row is None or row.algorithm is None or row.algorithm.month_at(usage.period.start) is None:
            return
        if row.key_kind == "account":
            yield from self._measure(usage, usage.used, Identity(account=f"account:{usage.account}"), "")
        elif row.key_kind in ("key", "api_key", "user"):
            capacity, _length = row.algorithm.quota
            least = min(capacity, self._smallest_override(row.name) or capacity)
            if usage.used * 100 >= least * lowest:
                for key, used in self._by_key(usage):
                    yield from self._measure(usage, used, _of_key(usage.account, key), key)

    def _measure(self, usage: AccountUsage, used: int, identity: Identity, key: str) -> Iterator[Measure]:
        row = self._snapshot.rows.rules[usage.rule]
        applied = self._snapshot.applicable(row.scope, min(row.methods, default=""), identity)
        for rule in applied:
            capacity, _length = rule.algorithm.quota
            if rule.rule == usage.rule and capacity > 0 and _covers(rule.algorithm, usage.period):
                yield Measure(Alert.Basis.LIMIT, used, capacity, key)

    def _smallest_override(self, name: str) -> int | None:
        if name not in self._smallest:
            # Of nothing there is no share: who is blocked is told nothing, and must not hide the next smallest.
            rows = KeyOverride.objects.using(self._using).filter(rule=name, capacity__gt=0)
            self._smallest[name] = rows.aggregate(least=Min("capacity"))["least"]
        return self._smallest[name]

    def _by_key(self, usage: AccountUsage) -> list[tuple[str, int]]:
        rows = Line.objects.using(self._using).filter(account=usage.account, period=usage.period.start // SECOND)
        keys = rows.filter(meter=usage.meter, rule=usage.rule).values_list("key").order_by()
        sums = keys.annotate(used=Sum("admitted_units") - Sum("refunded_units")).order_by("-used", "key")
        return [(key, used) for key, used in sums[:_KEYS]]


def _of_key(account: str, key: str) -> Identity:
    owner = f"account:{account}"
    return Identity(user=key, account=owner) if key.startswith("user:") else Identity(api_key=key, account=owner)


def _covers(algorithm: Algorithm, period: Period) -> bool:
    """Return whether a rule's limit is one of a month that is, but for the time zone, the billing period."""
    month = algorithm.month_at((period.start + period.end) // 2)
    return month is not None and abs(month[0] - period.start) <= _APART and abs(month[1] - period.end) <= _APART
