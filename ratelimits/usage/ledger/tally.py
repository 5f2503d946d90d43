"""Tallying: add the usage in a shard's new batches to the totals of billing periods and of short spans of time.

The totals, and the position up to which the shard was tallied, are changed in one transaction, under the lock of the
shard's row. A total that does not fit in its column stays at the largest number (MAX_TOTAL): then its period is not
closed, but the shard's other usage is tallied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from functools import reduce
from operator import add, or_
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import F, Max, Min, Q, QuerySet

from ratelimits.conf import conf
from ratelimits.models.periods import UsedPeriod, freeze, frozen_around
from ratelimits.progress import Progress
from ratelimits.usage.ledger import crash, span_totals
from ratelimits.usage.models import Batch, Line, PeriodUsage, ShardState
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum, saturating_add

logger = logging.getLogger(__name__)

#: The columns that say what a line counts. The first two are the account's text and the bin.
SUBJECT = ("account", "bin", "meter", "rule")
#: The columns that say what a total counts, except for its shard.
TOTAL = ("account", "period", "meter", "rule", "period_end", "customer_id")
#: The counters that are added up for each billing period.
SUMS = ("admitted_requests", "admitted_units", "denied_requests", "shadow_requests", "refunded_units")
#: Sums, by the values of TOTAL.
Sums = dict[tuple[Any, ...], tuple[int, ...]]
#: Maximum number of accounts that a query names.
_MAX_NAMED = 1000
#: How many batches are added up in one query and one transaction.
_BATCHES_PER_QUERY = 32
_SECOND = 1_000_000


def tally(progress: Progress | None = None, *, wait: bool = False) -> int:
    """Add all batches that are not tallied yet to the totals. Return how many batches were added.

    `progress` shows how many shards are done. If `wait` is true, wait for a shard that another process has locked.
    Otherwise leave such a shard out. If a shard cannot be tallied, tally the others, and then raise its error.
    """
    using, count = conf.DATABASE, 0
    failed: list[Exception] = []
    untallied = ShardState.objects.using(using).filter(position__gt=F("tallied"))
    shards = list(untallied.values_list("shard", flat=True))
    for shard in (progress or Progress()).counted("shards", shards, len(shards)):
        try:
            while tallied := _tally_shard(using, shard, wait=wait):
                count += tallied
        except Exception as error:
            if isinstance(error, OperationalError | InterfaceError) and not connections[using].is_usable():
                raise  # The database does not answer, so no other shard can be tallied.
            failed.append(error)
            logger.exception("Shard %02d cannot be tallied; other shards are tallied", shard)
    if failed:
        raise failed[0]
    return count


def _tally_shard(using: str, shard: int, *, wait: bool) -> int:
    """Add the next batches of a shard to the totals. Return how many batches were added."""
    with transaction.atomic(using=using, durable=True):
        state = ShardState.lock(using, shard, wait=wait)
        if state is None or state.tallied >= state.position:
            return 0
        rows = Batch.objects.using(using).filter(shard=shard, position__gt=state.tallied).order_by("position")
        batches = list(rows[:_BATCHES_PER_QUERY])
        crash.reached("tally:locked")
        if batches:
            _add(using, shard, batches)
            crash.reached("tally:periods-added")
            span_totals.add(using, (batch.line_ids() for batch in batches), int(time.time()))
        crash.reached("tally:added")
        state.tallied = batches[-1].position if batches else state.position
        state.save(using=using, update_fields=["tallied"])
    crash.reached("tally:committed")
    return len(batches)


def _add(using: str, shard: int, batches: list[Batch]) -> None:
    """Add these batches to the totals of billing periods. Freeze the periods that are not frozen yet."""
    ranges = reduce(or_, (Q(pk__gte=first, pk__lt=end) for first, end in (batch.line_ids() for batch in batches)))
    totals = _totals(using, Line.objects.using(using).filter(ranges).order_by())
    crash.reached("tally:periods-frozen")
    columns = (*TOTAL, *SUMS, "shard", "position")
    connection = connections[using]
    quote = connection.ops.quote_name
    table = quote(PeriodUsage._meta.db_table)
    sums = ", ".join(saturating_add(table, quote(name)) for name in SUMS)
    statement = (
        f"INSERT INTO {table} ({', '.join(map(quote, columns))}) VALUES ({', '.join(['%s'] * len(columns))})"  # noqa: S608
        f" ON CONFLICT (account, period, meter, rule, shard, customer_id) DO UPDATE SET {sums},"
        " position = excluded.position"
    )
    position = batches[-1].position
    # Insert in sorted order. The transactions of two shards then lock pages of the index in the same order, so they
    # cannot deadlock.
    values = [
        (*subject, *(min(total, MAX_TOTAL) for total in counts), shard, position)
        for subject, counts in sorted(totals.items())
    ]
    with connection.cursor() as cursor:
        cursor.executemany(statement, values)


def _totals(using: str, lines: QuerySet[Line]) -> Sums:
    """Return the sums of lines, by the values of TOTAL. Freeze the periods that are not frozen yet."""
    sums = [ExactSum(name) for name in SUMS]
    groups = list(lines.values_list("account", "meter", "rule").annotate(*sums, Min("bin"), Max("bin")))
    frozen = frozen_around(using, {(row[0], *row[-2:]) for row in groups})
    # Only these accounts must be added up bin by bin. In each period, only the first tally freezes it, and few tallies
    # have usage of two periods or of two customers of an account.
    others = {row[0] for row in groups if (row[0], *row[-2:]) not in frozen}
    added: Sums = {}
    for account, meter, rule, *counts, first, last in groups:
        if account not in others:
            _add_to(added, account, meter, rule, frozen[account, first, last], counts)
    if others:
        if len(others) <= _MAX_NAMED:
            lines = lines.filter(account__in=others)
        by_bin = [row for row in lines.values_list(*SUBJECT).annotate(*sums) if row[0] in others]
        added |= sums_by_period(using, by_bin)
    return added


def sums_by_period(using: str, rows: Collection[Sequence[Any]], ending_after: int = 0) -> Sums:
    """Add up sums by the customer whom each text names at a bin, and by the customer's billing period at this bin.

    A row has the values of SUBJECT, then those of SUMS. The keys of the result have the values of TOTAL. Leave out
    periods that end at `ending_after` (s since 1970 UTC) or earlier. Make a customer for each text that has none, and
    freeze the periods that are not frozen yet.
    """
    used = freeze(using, {(row[0], row[1]) for row in rows})
    added: Sums = {}
    for account, bin_, meter, rule, *sums in rows:
        if used[account, bin_].period.end // _SECOND > ending_after:
            _add_to(added, account, meter, rule, used[account, bin_], sums)
    return added


def _add_to(added: Sums, account: str, meter: str, rule: int, used: UsedPeriod, sums: Sequence[int]) -> None:
    key = account, used.period.start // _SECOND, meter, rule, used.period.end // _SECOND, used.customer
    known = added.get(key)
    added[key] = tuple(sums) if known is None else tuple(map(add, known, sums))
