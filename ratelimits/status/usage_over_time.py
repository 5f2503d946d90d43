"""The numbers of requests over time, and the accounts, keys and rules with the most requests.

There are four kinds of requests: admitted, refused, refused only by rules in shadow mode, and unmetered (admitted while
Redis did not answer, so not counted). The numbers come from totals of short spans and from process totals. So the
number of queries is fixed, and the time does not grow with the ledger.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Generic, Literal, TypeVar

from django.db.models import Sum

from ratelimits.conf import conf
from ratelimits.models import KeyTotal, ProcessTotal, Rule, RuleTotal
from ratelimits.models.status.totals import DAY, HOUR, QUARTER, SUMS

T = TypeVar("T")
Kind = Literal["admitted", "denied", "shadow", "unmetered"]
Dimension = Literal["account", "key", "rule"]
#: The kinds in the order of the page. The ledger counts the first three, in the order of SUMS.
KINDS: tuple[Kind, ...] = ("admitted", "denied", "shadow", "unmetered")
#: Number of accounts, keys and rules that are listed for each kind.
TOP = 5


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time in steps of equal length, which ends with the current step. All numbers are in seconds.

    `start` is seconds since 1970 UTC; `step` is the length of a step and `steps` is their number.
    """

    start: int
    step: int
    steps: int
    #: The length of the spans in which totals of keys are kept for this window.
    key_span: int

    def starts(self) -> range:
        """Return the start of each step."""
        return range(self.start, self.start + self.step * self.steps, self.step)


def last_day(now: int) -> Window:
    """Return 24 hours in steps of 15 minutes: the current hour and the 23 hours before it."""
    return Window((now // HOUR - 23) * HOUR, QUARTER, 96, HOUR)


def last_month(now: int) -> Window:
    """Return 30 days in UTC: today and the 29 days before it."""
    return Window((now // DAY - 29) * DAY, DAY, 30, DAY)


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one step, by kind."""

    start: int
    counts: Mapping[Kind, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One account, key or rule of a list.

    `account` is the account of a key. `rule` is the rule that refused most of the requests; 0 if no rule did.
    """

    name: str
    requests: int
    account: str = ""
    rule: int = 0


@dataclass(frozen=True, slots=True)
class UsageOverTime:
    """The usage of one meter in a window. `meters` has the number of requests of each meter."""

    meter: str
    meters: Mapping[str, int]
    steps: tuple[Step, ...]
    totals: Mapping[Kind, int]
    tops: Mapping[Kind, Mapping[Dimension, tuple[Entry, ...]]]
    rule_names: Mapping[int, str]


def usage_over_time(window: Window, meter: str = "") -> UsageOverTime:
    """Return the usage of a meter in a window. For "" or an unknown meter, take the meter with the most requests.

    A request may count in several meters, so the numbers of different meters are never added up.
    """
    using = conf.DATABASE
    by_meter: dict[str, dict[int, Counter[Kind]]] = defaultdict(lambda: defaultdict(Counter))
    rows = RuleTotal.objects.using(using).filter(span=window.step, start__gte=window.start).order_by()
    for name, start, *sums in rows.values_list("meter", "start").annotate(*(Sum(column) for column in SUMS)):
        by_meter[name][start].update(dict(zip(KINDS, sums, strict=False)))
    unmetered = ProcessTotal.objects.using(using).filter(kind="unmetered", bin__gte=window.start).order_by()
    for name, start, requests in unmetered.values_list("meter", "bin").annotate(Sum("requests")):
        by_meter[name][start // window.step * window.step]["unmetered"] += requests
    meters = {name: sum(sum(counts.values()) for counts in steps.values()) for name, steps in by_meter.items()}
    meters = dict(sorted(meters.items(), key=lambda pair: (-pair[1], pair[0])))
    meter = meter if meter in meters else next(iter(meters), "")
    steps = by_meter[meter]
    tops = _tops(using, window, meter)
    named = {int(entry.name) for lists in tops.values() for entry in lists["rule"]}
    named |= {entry.rule for lists in tops.values() for entries in lists.values() for entry in entries}
    return UsageOverTime(
        meter=meter,
        meters=meters,
        steps=tuple(Step(start, {kind: steps[start][kind] for kind in KINDS}) for start in window.starts()),
        totals={kind: sum(counts[kind] for counts in steps.values()) for kind in KINDS},
        tops=tops,
        rule_names=dict(Rule.objects.using(using).filter(pk__in=named).values_list("pk", "name")),
    )


def _tops(using: str, window: Window, meter: str) -> dict[Kind, dict[Dimension, tuple[Entry, ...]]]:
    accounts, keys, rules = _Sums[str](), _Sums[tuple[str, str]](), _Sums[int]()
    rows = KeyTotal.objects.using(using).filter(span=window.key_span, start__gte=window.start, meter=meter).order_by()
    subjects = rows.values_list("account", "key", "rule").annotate(*(Sum(column) for column in SUMS))
    for account, key, rule, *sums in subjects.iterator(chunk_size=5_000):
        for kind, requests in zip(KINDS, sums, strict=False):
            if requests:
                accounts.add(kind, account, requests, rule)
                keys.add(kind, (account, key), requests, rule)
                rules.add(kind, rule, requests, 0)
    unmetered = ProcessTotal.objects.using(using).filter(kind="unmetered", bin__gte=window.start, meter=meter)
    for account, key, requests in unmetered.order_by().values_list("account", "key").annotate(Sum("requests")):
        accounts.add("unmetered", account, requests, 0)
        keys.add("unmetered", (account, key), requests, 0)
    return {
        kind: {
            "account": tuple(Entry(name, count, rule=rule) for name, count, rule in accounts.top(kind)),
            "key": tuple(Entry(key, count, account, rule) for (account, key), count, rule in keys.top(kind)),
            "rule": tuple(Entry(str(rule), count) for rule, count, _rule in rules.top(kind)),
        }
        for kind in KINDS
    }


class _Sums(Generic[T]):
    """The requests of all accounts, of all keys or of all rules, by kind and name; and how many each rule refused."""

    def __init__(self) -> None:
        self._requests: dict[Kind, Counter[T]] = {kind: Counter() for kind in KINDS}
        self._rules: dict[tuple[Kind, T], Counter[int]] = defaultdict(Counter)

    def add(self, kind: Kind, name: T, requests: int, rule: int) -> None:
        """Add requests; `rule` is 0 if no rule refused them."""
        self._requests[kind][name] += requests
        if rule and kind in ("denied", "shadow"):
            self._rules[kind, name][rule] += requests

    def top(self, kind: Kind) -> list[tuple[T, int, int]]:
        """Return the names with the most requests, each with its number of requests and the rule that refused most."""
        most = nsmallest(TOP, self._requests[kind].items(), key=lambda pair: (-pair[1], str(pair[0])))
        return [(name, requests, self._first_rule(kind, name)) for name, requests in most]

    def _first_rule(self, kind: Kind, name: T) -> int:
        rules = self._rules.get((kind, name))
        return rules.most_common(1)[0][0] if rules else 0
