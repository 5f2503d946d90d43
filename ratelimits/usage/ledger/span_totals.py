"""Totals of ledger lines for spans of time, from a quarter of an hour to five days. The status pages show these totals.

The database adds up the lines, in one statement for each table and each length of span.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import F

from ratelimits.progress import Progress
from ratelimits.usage.models.ledger import Batch, Line, ShardState
from ratelimits.usage.models.sums import saturating_add, saturating_sum
from ratelimits.usage.models.totals import (
    DAY,
    FIVE_DAYS,
    HOUR,
    QUARTER,
    SIX_HOURS,
    SUMS,
    KeyTotal,
    RuleTotal,
    SpanTotal,
)

#: The age in seconds at which totals are deleted, by the length of their span. One page shows a day, another 30 days.
MAX_AGES = {QUARTER: 25 * HOUR, HOUR: 25 * HOUR, SIX_HOURS: 25 * HOUR, DAY: 31 * DAY, FIVE_DAYS: 31 * DAY}
#: The counters of refusals: all but the first, which is the counter of admitted requests.
_REFUSED = SUMS[1:]


class _Table(NamedTuple):
    """A table of totals.

    model    the model of the table
    spans    the lengths of the table's spans, each with the counters that are added up; the other counters stay 0
    subject  the columns that say what a total is about
    """

    model: type[SpanTotal]
    spans: dict[int, tuple[str, ...]]
    subject: tuple[str, ...]


#: For a quarter of an hour, `KeyTotal` has only refusals: few keys are refused, so there are few rows.
_TABLES = (
    _Table(RuleTotal, {QUARTER: SUMS, DAY: SUMS}, ("rule", "meter")),
    _Table(
        KeyTotal,
        {QUARTER: _REFUSED, HOUR: SUMS, SIX_HOURS: SUMS, DAY: SUMS, FIVE_DAYS: SUMS},
        ("account", "key", "rule", "meter"),
    ),
)


def first_start(span: int, now: int) -> int:
    """Return the start (s since 1970 UTC) of the oldest span of this length that is not deleted yet."""
    return (now - MAX_AGES[span]) // span * span


def add(using: str, ranges: Iterable[tuple[int, int]], now: int) -> None:
    """Add the lines in these ranges of primary keys to the totals. A range does not include its end.

    `now` is in seconds since 1970 UTC.
    """
    quote, pairs = connections[using].ops.quote_name, list(ranges)
    pk = quote(str(Line._meta.pk.column))
    where = " OR ".join([f"({pk} >= %s AND {pk} < %s)"] * len(pairs))
    _add_where(using, f"({where})", [bound for pair in pairs for bound in pair], now)


def _add_where(
    using: str,
    where: str,
    values: Sequence[Any],
    now: int,
    progress: Progress | None = None,
    only: type[SpanTotal] = SpanTotal,
) -> None:
    """Add the lines for which the SQL condition `where` is true to the totals. `values` are its parameters.

    `only` is the class of the totals; by default, add to all of them.
    """
    connection = connections[using]
    quote = connection.ops.quote_name
    lines, sums = quote(Line._meta.db_table), [quote(name) for name in SUMS]
    kinds = [
        (model, span, counters, names)
        for model, spans, names in _TABLES
        if issubclass(model, only)
        for span, counters in spans.items()
    ]
    for model, span, counters, names in (progress or Progress()).counted("kinds of totals", kinds, len(kinds)):
        table, subject = quote(model._meta.db_table), [quote(name) for name in names]
        set_sums = ", ".join(saturating_add(table, name) for name in sums)
        start = f"{quote('bin')} / {span} * {span}"
        new_sums = [saturating_sum(connection.vendor, quote(name)) if name in counters else "0" for name in SUMS]
        # ORDER BY: two transactions then lock rows in the same order, so they cannot deadlock.
        statement = (
            f"INSERT INTO {table} ({quote('span')}, {quote('start')}, {', '.join([*subject, *sums])})"  # noqa: S608
            f" SELECT {span}, {start}, {', '.join([*subject, *new_sums])}"
            f" FROM {lines} WHERE {where} AND {quote('bin')} >= %s"
            f" GROUP BY {', '.join([start, *subject])}"
            f" HAVING {' OR '.join(f'MAX({quote(name)}) > 0' for name in counters)}"
            f" ORDER BY {', '.join([start, *subject])}"
            f" ON CONFLICT ({quote('span')}, {quote('start')}, {', '.join(subject)}) DO UPDATE SET {set_sums}"
        )
        with connection.cursor() as cursor:
            cursor.execute(statement, [*values, first_start(span, now)])


def expire(using: str, now: int) -> int:
    """Delete totals that are older than `MAX_AGES`. Return how many were deleted. `now` is in s since 1970 UTC."""
    count = 0
    for model, spans, _names in _TABLES:
        rows = model._default_manager.using(using)
        count += sum(rows.filter(span=span, start__lt=first_start(span, now))._raw_delete(using) for span in spans)
    return count


def count_again(using: str, accounts: Sequence[str]) -> int:
    """Delete the totals of keys of these accounts, and calculate them again. Return how many were deleted.

    The shards of these accounts must be locked.
    """
    count = 0
    for account in accounts:
        count += KeyTotal.objects.using(using).filter(account=account)._raw_delete(using)
    names = f"{connections[using].ops.quote_name('account')} IN ({', '.join(['%s'] * len(accounts))})"
    where = f"{_is_tallied(using)} AND {names}"
    _add_where(using, where, accounts, int(time.time()), only=KeyTotal)
    return count


def rebuild(using: str, now: int, progress: Progress | None = None) -> None:
    """Delete all totals, and calculate them again. Drains wait until this has ended.

    Only the lines of tallied batches are used: their usage was added to totals before. The next tally adds the usage of
    later batches. `progress` shows how many kinds of totals are done.
    """
    with transaction.atomic(using=using, durable=True):
        states = ShardState.objects.using(using)
        if connections[using].features.has_select_for_update:
            list(states.select_for_update().order_by("shard"))  # lock all rows
        else:
            states.update(position=F("position"))  # A write as the first statement takes SQLite's write lock at once.
        for model, _spans, _names in _TABLES:
            model._default_manager.using(using).all()._raw_delete(using)
        _add_where(using, _is_tallied(using), [], now, progress)


def _is_tallied(using: str) -> str:
    """Return the SQL condition for the lines of batches that were added to totals."""
    quote = connections[using].ops.quote_name
    shard, position, tallied, batch = map(quote, ("shard", "position", "tallied", "batch_id"))
    state_table, batch_table = quote(ShardState._meta.db_table), quote(Batch._meta.db_table)
    return (
        f"{batch} NOT IN (SELECT {batch_table}.{quote('id')} FROM {batch_table} JOIN {state_table}"  # noqa: S608
        f" ON {state_table}.{shard} = {batch_table}.{shard}"
        f" WHERE {batch_table}.{position} > {state_table}.{tallied})"
    )
