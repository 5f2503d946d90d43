"""The requests that were refused, and those that rules in shadow mode would have refused.

The numbers are read from totals of short spans, not from the ledger. So these functions do not become slower when the
ledger grows.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest, nsmallest
from typing import NamedTuple

from django.db.models import Count, F, Max, Q, Sum, Window
from django.db.models.functions import RowNumber

from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.models.keys import key_name
from ratelimits.usage.models import KeyTotal, ProcessTotal, RuleTotal
from ratelimits.usage.models.totals import DAY, HOUR, QUARTER, newest_days

#: Maximum number of rows of each list on a page. If there are more, a function returns one more row, as a sign.
MAX_REFUSALS = 50
#: Maximum number of rows that are read for the newest refusals of all keys.
_MAX_READ = 2_000
#: The columns that say which refusals a total counts. Totals of different meters can have the same values in these
#: columns.
_SUBJECT = "start", "account", "key", "rule"
#: Number of hours for which shadow refusals are shown. The current hour is one of them.
HOURS = 24
#: Maximum number of shadow rules that are listed.
MAX_RULES = 100
#: Maximum number of keys that are listed for one shadow rule.
TOP = 10


@dataclass(frozen=True, slots=True)
class RefusedRequests:
    """The requests that one rule or block refused in a span of time."""

    #: Start of the span, in seconds since 1970 UTC.
    start: int
    #: Length of the span in seconds.
    seconds: int
    #: The key whose requests were refused; "" for a block, which counts the requests of all its keys together.
    key: str
    #: Primary key of the rule; 0 for a block.
    rule: int
    meter: str
    #: Number of refused requests.
    denied: int
    #: Number of requests that the rule would have refused, but admitted because it was in shadow mode.
    shadow: int = 0
    #: The target of the block; "" for a rule.
    target: str = ""


def refused_lately(account: str, key: str, now: float) -> list[RefusedRequests]:
    """Return the refusals of the last 24 hours by quarter of an hour, newest first, at most `MAX_REFUSALS` + 1.

    If `key` is "", return the refusals of all keys of the account. `now` is in seconds since 1970 UTC.
    """
    current = int(now) // QUARTER * QUARTER
    return _refused(QUARTER, range(current - 24 * HOUR, current + 1, QUARTER), account, key)


def refused_by_day(account: str, key: str, now: float) -> list[RefusedRequests]:
    """Return the refusals of the last 30 days by day in UTC, newest first. The arguments are as in `refused_lately`."""
    return _refused(DAY, newest_days(now, 30), account, key)


def refused_at(account: str, key: str, moment: int, now: float) -> list[RefusedRequests]:
    """Return the refusals of the quarter of an hour that contains a moment.

    If the moment is more than 24 hours ago, return the refusals of its day in UTC. `moment` is in seconds since 1970
    UTC. The other arguments are as in `refused_lately`.
    """
    span = span_at(moment, now)
    return _refused(span, [moment // span * span], account, key)


def span_at(moment: int, now: float) -> int:
    """Return the length (s) of the span in which a moment's refusals are counted: a quarter of an hour or a day."""
    return QUARTER if moment >= int(now) // QUARTER * QUARTER - 24 * HOUR else DAY


def _refused(span: int, starts: Sequence[int], account: str, key: str) -> list[RefusedRequests]:
    # Name every start, so that the database can use the index.
    rows = KeyTotal.objects.using(conf.DATABASE).filter(span=span, start__in=list(starts), account=account)
    if key:
        rows = rows.filter(key=ledger_name(key))
    rows = rows.filter(Q(denied_requests__gt=0) | Q(shadow_requests__gt=0)).order_by("-start", "-denied_requests", "pk")
    columns = "start", "key", "rule", "meter", "denied_requests", "shadow_requests"
    return [
        RefusedRequests(start, span, row_key, rule, meter, denied, shadow)
        for start, row_key, rule, meter, denied, shadow in rows.values_list(*columns)[: MAX_REFUSALS + 1]
    ]


def with_meters_joined(rows: Iterable[RefusedRequests]) -> list[RefusedRequests]:
    """Return one row for each span, key and rule or block, in the same order, with the largest numbers of its meters.

    A refused request is counted once for each meter in which it has a cost, so the numbers must not be added up.
    """
    joined: dict[tuple[int, str, int, str], RefusedRequests] = {}
    for row in rows:
        subject = row.start, row.key, row.rule, row.target
        before = joined.get(subject, row)
        denied, shadow = max(row.denied, before.denied), max(row.shadow, before.shadow)
        joined[subject] = replace(before, denied=denied, shadow=shadow)
    return list(joined.values())


class NewRefusal(NamedTuple):
    """The requests of one key that one rule refused in a quarter of an hour. `rule` is 0 for a block.

    The quarter begins at `start`, in seconds since 1970 UTC.
    """

    start: int
    account: str
    key: str
    rule: int
    denied: int


def newest_refusals(now: float, count: int) -> list[NewRefusal]:
    """Return the newest refusals of the last 60 to 75 minutes, of all keys, at most `count`. This is one query.

    In each quarter of an hour, the keys with most refusals come first. The query reads at most `_MAX_READ` totals.
    """
    current = int(now) // QUARTER * QUARTER
    rows = KeyTotal.objects.using(conf.DATABASE).filter(span=QUARTER, start__gte=current - HOUR, denied_requests__gt=0)
    largest: dict[tuple[int, str, str, int], int] = {}
    columns = *_SUBJECT, "denied_requests"
    for start, account, key, rule, denied in rows.order_by("-start").values_list(*columns)[:_MAX_READ]:
        subject = start, account, key, rule
        # A request can be counted in several meters. So the largest number is taken, not the sum.
        largest[subject] = max(largest.get(subject, 0), denied)
    found = [NewRefusal(*subject, denied) for subject, denied in largest.items()]
    return sorted(found, key=lambda refusal: (-refusal.start, -refusal.denied, refusal))[:count]


def refused_of_keys(keys: Collection[tuple[str, str]], now: float) -> Counter[tuple[str, str]]:
    """Return, for pairs (account, key), the number of requests that were refused in the last 23 to 24 hours.

    This is one query. `now` is in seconds since 1970 UTC.
    """
    current = int(now) // HOUR * HOUR
    starts = list(range(current - 23 * HOUR, current + 1, HOUR))
    accounts, names = {account for account, _key in keys}, {ledger_name(key) for _account, key in keys}
    rows = KeyTotal.objects.using(conf.DATABASE).filter(span=HOUR, start__in=starts, denied_requests__gt=0)
    rows = rows.filter(account__in=accounts, key__in=names).order_by()
    counts: Counter[tuple[str, str]] = Counter()
    largest = rows.values(*_SUBJECT).annotate(denied=Max("denied_requests"))
    for account, key, denied in largest.values_list("account", "key", "denied"):
        counts[account, key] += denied
    return counts


def blocked_lately(targets: Collection[str], now: float) -> list[RefusedRequests]:
    """Return the requests that blocks of these targets refused in 24 hours, by quarter of an hour, newest first.

    The numbers are process totals. A number counts the requests of all keys of a block together. `now` is in seconds
    since 1970 UTC.
    """
    since = int(now) // QUARTER * QUARTER - 24 * HOUR
    rows = ProcessTotal.objects.using(conf.DATABASE).filter(kind="blocked", bin__gte=since)
    target_of = {ledger_name(key_name(target)): target for target in targets}
    rows = rows.filter(key__in=target_of)
    largest: dict[tuple[int, str], RefusedRequests] = {}
    for start, name, meter, requests in rows.order_by().values_list("bin", "key", "meter").annotate(Sum("requests")):
        target = target_of[name]
        before = largest.get((start, target))
        # A request can be counted in several meters. So the largest number is taken, not the sum.
        if before is None or before.denied < requests:
            largest[start, target] = RefusedRequests(
                start, QUARTER, key="", rule=0, meter=meter, denied=requests, target=target
            )
    return sorted(largest.values(), key=lambda row: (-row.start, row.target))[: MAX_REFUSALS + 1]


def requests_of(targets: Collection[str] | None, seconds: int) -> dict[str, int]:
    """Return, by target, the number of requests that a block refused or an allow exempted.

    Count only these `targets` (all targets if it is None), and only requests of the last `seconds`. The table counts a
    request once for each of its meters. So return the count of the meter with the most requests.
    """
    rows = ProcessTotal.objects.using(conf.DATABASE).filter(kind__in=("blocked", "exempt"))
    rows = rows.filter(bin__gte=int(time.time()) - seconds)
    if targets is not None:
        rows = rows.filter(key__in=[ledger_name(key_name(target)) for target in targets])
    counts: dict[str, int] = {}
    for key, _meter, requests in rows.order_by().values_list("key", "meter").annotate(Sum("requests")):
        counts[key] = max(counts.get(key, 0), requests)
    return counts


def last_refusals(identity: Identity, key: str) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each rule with refusals of a key in 24 hours, with a moment and the number of refused requests.

    The moment is the start of the newest quarter of an hour with refusals, in s since 1970 UTC. Only the newest rows
    are counted (see `refused_lately`). For a key without an account, yield nothing.
    """
    if not identity.account:
        return
    newest_first = refused_lately(identity.account_id, "" if key == identity.account else key, time.time())
    refusals: dict[int, tuple[int, int]] = {}
    for row in with_meters_joined(newest_first):
        if row.denied:
            start, refused = refusals.get(row.rule, (row.start, 0))
            refusals[row.rule] = start, refused + row.denied
    yield from refusals.items()


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
