"""The requests of the last 24 hours that rules in shadow mode would have refused, by rule, hour and key.

The numbers are read from totals of short spans. So the number of queries is fixed, and the queries do not become slower
when the ledger grows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from typing import NamedTuple

from django.db.models import Count, F, Q, Sum, Window
from django.db.models.functions import RowNumber

from ratelimits.conf import conf
from ratelimits.models import KeyTotal, Rule, RuleTotal
from ratelimits.models.status.totals import HOUR, QUARTER

#: Number of hours that are shown. The current hour is one of them.
HOURS = 24
#: Maximum number of rules that are listed.
MAX_RULES = 100
#: Maximum number of keys that are listed for one rule.
TOP = 10


class ShadowedKey(NamedTuple):
    """A key, its account, and how many of its requests the rule would have refused."""

    account: str
    key: str
    requests: int


@dataclass(frozen=True, slots=True)
class ShadowRule:
    """A rule, and the admitted requests that it would have refused if it were enforced.

    hours      the number of these requests in each hour, the oldest hour first
    keys       the keys with most of these requests
    key_count  the number of keys that have such requests
    """

    rule: Rule
    hours: tuple[int, ...]
    keys: tuple[ShadowedKey, ...]
    key_count: int

    @property
    def total(self) -> int:
        """Return the number of these requests in all hours."""
        return sum(self.hours)


def hours_until(now: float) -> range:
    """Return the starts of the newest HOURS hours, in seconds since 1970 UTC. `now` has the same unit."""
    current = int(now) // HOUR * HOUR
    return range(current - (HOURS - 1) * HOUR, current + 1, HOUR)


def shadow_refusals(now: float, only: Rule | None = None) -> list[ShadowRule]:
    """Return the rules in shadow mode, and other rules that had shadow refusals. Sort by these refusals, most first.

    An enforced rule has shadow refusals if it was in shadow mode less than 24 hours ago, or if an override has the mode
    "shadow". With `only`, return only this rule. There are at most MAX_RULES rules. `now` is in s since 1970 UTC.
    """
    using, hours = conf.DATABASE, hours_until(now)
    totals = RuleTotal.objects.using(using).filter(span=QUARTER, start__gte=hours[0], shadow_requests__gt=0)
    if only is not None:
        totals = totals.filter(rule=only.pk)
    by_hour: dict[int, Counter[int]] = defaultdict(Counter)
    for pk, start, requests in totals.order_by().values_list("rule", "start", "shadow_requests"):
        by_hour[pk][start // HOUR * HOUR] += requests
    if only is None:
        # Deleted rules are in the totals, but not in the table of rules. So they are left out.
        most_refusals_first = nlargest(MAX_RULES, by_hour, key=lambda pk: by_hour[pk].total())
        wanted = Q(mode=Rule.Mode.SHADOW) | Q(pk__in=most_refusals_first)
        rules = list(Rule.objects.using(using).select_related("plan").filter(wanted))
    else:
        rules = [only]
    rules = nsmallest(MAX_RULES, rules, key=lambda rule: (-by_hour[rule.pk].total(), rule.name, rule.pk))
    keys, counts = _largest_keys(using, hours, [rule.pk for rule in rules])
    return [
        ShadowRule(
            rule,
            tuple(by_hour[rule.pk][start] for start in hours),
            tuple(keys[rule.pk]),
            counts[rule.pk],
        )
        for rule in rules
    ]


def _largest_keys(using: str, hours: range, rules: list[int]) -> tuple[dict[int, list[ShadowedKey]], dict[int, int]]:
    """Return, for each rule, the TOP keys with the most shadow refusals, and how many keys have any.

    The database sorts and counts the keys, so that this process never has all of them in memory.
    """
    # Read the totals of quarters of an hour. Only keys with refusals have such totals. The totals of hours also contain
    # the keys without refusals, so there are more of them.
    rows = KeyTotal.objects.using(using).filter(span=QUARTER, start__gte=hours[0], shadow_requests__gt=0)
    rows = rows.filter(rule__in=rules)
    sums = rows.order_by().values("rule", "account", "key").annotate(requests=Sum("shadow_requests"))
    order = F("requests").desc(), F("account").asc(), F("key").asc()
    ranked = sums.annotate(
        rank=Window(RowNumber(), partition_by="rule", order_by=order),
        count=Window(Count("*"), partition_by="rule"),
    ).filter(rank__lte=TOP)
    keys: dict[int, list[ShadowedKey]] = defaultdict(list)
    counts: dict[int, int] = defaultdict(int)
    columns = "rule", "account", "key", "requests", "count"
    for rule, account, key, requests, count in ranked.order_by("rule", "rank").values_list(*columns):
        keys[rule].append(ShadowedKey(account, key, requests))
        counts[rule] = count
    return keys, counts
