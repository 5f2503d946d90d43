"""Tallying: add the usage in a shard's new batches to the totals of billing periods and of short spans of time.

The totals, and the position up to which the shard was tallied, are changed in one transaction, under the lock of the
shard's row. A total that does not fit in its column stays at the largest number (MAX_TOTAL): then its period is not
closed, but the shard's other usage is tallied.
"""

from __future__ import annotations

import logging
import time
from functools import reduce
from operator import or_

from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.models import F, Max, Q

from ratelimits.conf import conf
from ratelimits.models import Batch, Line, PeriodUsage, ShardState
from ratelimits.models.kept import period_ends
from ratelimits.models.ledger.sums import MAX_TOTAL, ExactSum, saturating_add
from ratelimits.progress import Progress
from ratelimits.usage import crash, span_totals

logger = logging.getLogger(__name__)

#: The counters that are added up for each billing period.
_SUMS = ("admitted_requests", "admitted_units", "denied_requests", "shadow_requests", "refunded_units")
#: How many batches are added up in one query and one transaction.
_BATCHES_PER_QUERY = 32


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
    """Add these batches to the totals of billing periods."""
    ranges = reduce(or_, (Q(pk__gte=first, pk__lt=end) for first, end in (batch.line_ids() for batch in batches)))
    rows = (
        Line.objects.using(using)
        .filter(ranges)
        .values_list("account", "period", "meter", "rule")
        .order_by()
        .annotate(*(ExactSum(name) for name in _SUMS), Max("bin"))
    )
    columns = ("account", "period", "meter", "rule", *_SUMS, "shard", "position", "period_end")
    connection = connections[using]
    quote = connection.ops.quote_name
    table = quote(PeriodUsage._meta.db_table)
    sums = ", ".join(saturating_add(table, quote(name)) for name in _SUMS)
    # If a row has an end of its period (`period_end`), it keeps this end.
    statement = (
        f"INSERT INTO {table} ({', '.join(map(quote, columns))}) VALUES ({', '.join(['%s'] * len(columns))})"  # noqa: S608
        f" ON CONFLICT (account, period, meter, rule, shard) DO UPDATE SET {sums}, position = excluded.position,"
        f" period_end = COALESCE({table}.period_end, excluded.period_end)"
    )
    position = batches[-1].position
    # Insert in sorted order. The transactions of two shards then lock pages of the index in the same order, so they
    # cannot deadlock.
    totals = sorted(rows)
    last_bins: dict[tuple[str, int], int] = {}
    # With the last bin of a period, `period_ends` finds the end of this period.
    for account, period, *_counts, last_bin in totals:
        last_bins[account, period] = max(last_bin, last_bins.get((account, period), 0))
    ends = period_ends(using, last_bins)
    values = [
        (*subject, *(min(total, MAX_TOTAL) for total in counts), shard, position, ends.get(subject[:2]))
        for subject, counts in ((row[:4], row[4:-1]) for row in totals)
    ]
    with connection.cursor() as cursor:
        cursor.executemany(statement, values)
