"""The numbers of requests over time, and the accounts, keys and rules with the most requests.

There are four kinds of requests: admitted requests, refused requests, requests that only rules in shadow mode would
have refused, and unmetered requests. Unmetered requests were admitted while Redis did not answer, so Redis did not
count them.

The numbers are read from `RuleTotal`, `KeyTotal` and `ProcessTotal`, not from the ledger. So the number of queries is
fixed, and the queries do not become slower when the ledger grows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Generic, Literal, TypeVar

from django.db.models import Q

from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.usage.models import KeyTotal, ProcessTotal, RuleTotal
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.models.totals import DAY, FIVE_DAYS, HOUR, QUARTER, SIX_HOURS, SUMS

T = TypeVar("T")
Kind = Literal["admitted", "denied", "shadow", "unmetered"]
Dimension = Literal["account", "key", "rule"]
#: The kinds of requests in the order of the page. `SUMS` has the columns of the first three kinds, in this order.
KINDS: tuple[Kind, ...] = ("admitted", "denied", "shadow", "unmetered")
#: Number of accounts, keys and rules that are listed for each kind.
TOP = 5


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time that is divided into steps of equal length. It ends with the current hour or day."""

    #: Start of the first step, in seconds since 1970 UTC.
    start: int
    #: Length of a step in seconds.
    step: int
    #: Number of steps.
    steps: int
    #: Lengths (s) of the short and the long spans of `KeyTotal` that are read: short spans from the start of the window
    #: until a long span begins, and then long spans.
    key_spans: tuple[int, int]

    def starts(self) -> range:
        """Return the start of each step."""
        return range(self.start, self.start + self.step * self.steps, self.step)

    def key_totals(self) -> Q:
        """Return the condition for the `KeyTotal` rows that together have the usage of this window."""
        short, long = self.key_spans
        # The start of the window, rounded up to the start of a long span.
        first_long = -(-self.start // long) * long
        in_short = Q(span=short, start__gte=self.start, start__lt=first_long)
        return (in_short if first_long > self.start else Q()) | Q(span=long, start__gte=first_long)


def last_day(now: int) -> Window:
    """Return the window of the current hour and the 23 hours before it, in steps of 15 minutes."""
    return Window((now // HOUR - 23) * HOUR, step=QUARTER, steps=96, key_spans=(HOUR, SIX_HOURS))


def last_month(now: int) -> Window:
    """Return the window of today and the 29 days before it, in steps of a day in UTC."""
    return Window((now // DAY - 29) * DAY, step=DAY, steps=30, key_spans=(DAY, FIVE_DAYS))


@dataclass(frozen=True, slots=True)
class Step:
    """The numbers of requests in one step."""

    #: Start of the step, in seconds since 1970 UTC.
    start: int
    #: Number of requests of each kind.
    counts: Mapping[Kind, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry in a list of accounts, keys or rules."""

    #: The account, the key or the primary key of the rule.
    name: str
    requests: int
    #: The account of a key; "" in other lists.
    account: str = ""
    #: Primary key of the rule that refused most of these requests; 0 if no rule refused any of them.
    rule: int = 0


@dataclass(frozen=True, slots=True)
class UsageOverTime:
    """The usage of one meter in a window."""

    meter: str
    #: The number of requests (of all kinds) of each meter that has requests. On the page, people choose a meter.
    meters: Mapping[str, int]
    steps: tuple[Step, ...]
    #: Number of requests of each kind in the whole window.
    totals: Mapping[Kind, int]
    #: For each kind of request: the lists of the accounts, keys and rules with the most requests.
    tops: Mapping[Kind, Mapping[Dimension, tuple[Entry, ...]]]
    #: Names of the rules in these lists, by primary key.
    rule_names: Mapping[int, str]


def usage_over_time(window: Window, meter: str = "") -> UsageOverTime:
    """Return the usage of a meter in a window. If `meter` is "" or unknown, take the meter with the most requests.

    A request can be counted in several meters. So numbers of different meters are never added up.
    """
    using = conf.DATABASE
    by_meter: dict[str, dict[int, Counter[Kind]]] = defaultdict(lambda: defaultdict(Counter))
    rows = RuleTotal.objects.using(using).filter(span=window.step, start__gte=window.start).order_by()
    for name, start, *sums in rows.values_list("meter", "start").annotate(*(ExactSum(column) for column in SUMS)):
        by_meter[name][start].update(dict(zip(KINDS, sums, strict=False)))
    unmetered = ProcessTotal.objects.using(using).filter(kind="unmetered", bin__gte=window.start).order_by()
    for name, start, requests in unmetered.values_list("meter", "bin").annotate(ExactSum("requests")):
        by_meter[name][start // window.step * window.step]["unmetered"] += requests
    meters = {name: sum(sum(counts.values()) for counts in steps.values()) for name, steps in by_meter.items()}
    meters = dict(sorted(meters.items(), key=lambda pair: (-pair[1], pair[0])))
    meter = meter if meter in meters else next(iter(meters), "")
    steps = by_meter[meter]
    tops = _tops(using, window, meter)
    rule_ids = {int(entry.name) for lists in tops.values() for entry in lists["rule"]}
    rule_ids |= {entry.rule for lists in tops.values() for entries in lists.values() for entry in entries}
    return UsageOverTime(
        meter=meter,
        meters=meters,
        steps=tuple(Step(start, {kind: steps[start][kind] for kind in KINDS}) for start in window.starts()),
        totals={kind: sum(counts[kind] for counts in steps.values()) for kind in KINDS},
        tops=tops,
        rule_names=dict(Rule.objects.using(using).filter(pk__in=rule_ids).values_list("pk", "name")),
    )


def _tops(using: str, window: Window, meter: str) -> dict[Kind, dict[Dimension, tuple[Entry, ...]]]:
    accounts, keys, rules = _Sums[str](), _Sums[tuple[str, str]](), _Sums[int]()
    rows = KeyTotal.objects.using(using).filter(window.key_totals(), meter=meter).order_by()
    subjects = rows.values_list("account", "key", "rule").annotate(*(ExactSum(column) for column in SUMS))
    for account, key, rule, *sums in subjects.iterator(chunk_size=5_000):
        for kind, requests in zip(KINDS, sums, strict=False):
            if requests:
                accounts.add(kind, account, requests, rule)
                keys.add(kind, (account, key), requests, rule)
                rules.add(kind, rule, requests, 0)
    unmetered = ProcessTotal.objects.using(using).filter(kind="unmetered", bin__gte=window.start, meter=meter)
    for account, key, requests in unmetered.order_by().values_list("account", "key").annotate(ExactSum("requests")):
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
    """The numbers of requests of all accounts, of all keys or of all rules. A name is one account, key or rule."""

    def __init__(self) -> None:
        # Not `Counter`, which takes twice as long to add a new name.
        self._requests: dict[Kind, dict[T, int]] = {kind: defaultdict(int) for kind in KINDS}
        #: By kind and name: the number of requests that each rule refused.
        self._refused_by_rule: dict[tuple[Kind, T], Counter[int]] = defaultdict(Counter)

    def add(self, kind: Kind, name: T, requests: int, rule: int) -> None:
        """Add a number of requests. `rule` is 0 if no rule refused these requests."""
        self._requests[kind][name] += requests
        if rule and kind in ("denied", "shadow"):
            self._refused_by_rule[kind, name][rule] += requests

    def top(self, kind: Kind) -> list[tuple[T, int, int]]:
        """Return the names with the most requests, as (name, number of requests, rule that refused most of them)."""
        counts = self._requests[kind]
        # First find the smallest of the TOP largest numbers. Then only a few names must be sorted.
        smallest = min(nlargest(TOP, counts.values()), default=0)
        largest = [(name, requests) for name, requests in counts.items() if requests >= smallest]
        largest.sort(key=lambda pair: (-pair[1], str(pair[0])))
        return [(name, requests, self._most_refusing_rule(kind, name)) for name, requests in largest[:TOP]]

    def _most_refusing_rule(self, kind: Kind, name: T) -> int:
        refused = self._refused_by_rule.get((kind, name))
        return refused.most_common(1)[0][0] if refused else 0
