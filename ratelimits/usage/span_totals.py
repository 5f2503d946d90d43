"""Totals of ledger lines for short spans of time (15 minutes, an hour, a day), which the status pages show.

The database adds the lines up: one statement for each table and length of span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import connections, transaction
from django.db.models import F

from ratelimits.models.ledger import Batch, Line, ShardState
from ratelimits.models.status.totals import DAY, HOUR, QUARTER, SUMS, KeyTotal, RuleTotal, SpanTotal

#: For how many seconds spans of each length are kept: one page shows 24 hours, another shows 30 days.
KEPT = {QUARTER: 25 * HOUR, HOUR: 25 * HOUR, DAY: 31 * DAY}
#: The counters of refusals.
_REFUSED = SUMS[1:]
#: The tables; the lengths of their spans, each with the counters that it adds up (the others stay 0); and what a row is
#: about beside its span. Totals of keys in quarters of an hour have refusals alone: they are few.
_TABLES: tuple[tuple[type[SpanTotal], dict[int, tuple[str, ...]], tuple[str, ...]], ...] = (
    (RuleTotal, {QUARTER: SUMS, DAY: SUMS}, ("rule", "meter")),
    (KeyTotal, {QUARTER: _REFUSED, HOUR: SUMS, DAY: SUMS}, ("account", "key", "rule", "meter")),
)


def first_start(span: int, now: int) -> int:
    """Return the start (s since 1970 UTC) of the oldest span of this length that is kept."""
    return (now - KEPT[span]) // span * span


def add(using: str, ranges: Iterable[tuple[int, int]], now: int) -> None:
    """Add the lines in these ranges of primary keys to the totals. A range does not include its second number.

    `now` is s since 1970 UTC.
    """
    quote, pairs = connections[using].ops.quote_name, list(ranges)
    pk = quote(str(Line._meta.pk.column))
    where = " OR ".join([f"({pk} >= %s AND {pk} < %s)"] * len(pairs))
    _add_where(using, f"({where})", [bound for pair in pairs for bound in pair], now)


def _add_where(using: str, where: str, values: Sequence[Any], now: int) -> None:
    connection = connections[using]
    quote = connection.ops.quote_name
    lines, sums = quote(Line._meta.db_table), [quote(name) for name in SUMS]
    for model, spans, names in _TABLES:
        table, subject = quote(model._meta.db_table), [quote(name) for name in names]
        added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in sums)
        for span, counters in spans.items():
            # Add to rows in sorted order: two transactions lock them in the same order, so they cannot deadlock.
            start = f"{quote('bin')} / {span} * {span}"
            added_up = [f"SUM({quote(name)})" if name in counters else "0" for name in SUMS]
            statement = (
                f"INSERT INTO {table} ({quote('span')}, {quote('start')}, {', '.join([*subject, *sums])})"  # noqa: S608
                f" SELECT {span}, {start}, {', '.join([*subject, *added_up])}"
                f" FROM {lines} WHERE {where} AND {quote('bin')} >= %s"
                f" GROUP BY {', '.join([start, *subject])}"
                f" HAVING {' + '.join(added_up)} > 0"
                f" ORDER BY {', '.join([start, *subject])}"
                f" ON CONFLICT ({quote('span')}, {quote('start')}, {', '.join(subject)}) DO UPDATE SET {added}"
            )
            with connection.cursor() as cursor:
                cursor.execute(statement, [*values, first_start(span, now)])


def expire(using: str, now: int) -> int:
    """Delete the totals of spans that are too old (see KEPT); return their number. `now` is s since 1970 UTC."""
    count = 0
    for model, spans, _names in _TABLES:
        rows = model._default_manager.using(using)
        count += sum(rows.filter(span=span, start__lt=first_start(span, now))._raw_delete(using) for span in spans)
    return count


def rebuild(using: str, now: int) -> None:
    """Delete all totals and make them again from the lines that were tallied. Drains and tallies wait meanwhile."""
    with transaction.atomic(using=using, durable=True):
        states = ShardState.objects.using(using)
        if connections[using].features.has_select_for_update:
            list(states.select_for_update().order_by("shard"))
        else:
            states.update(position=F("position"))  # A write as the first statement takes SQLite's write lock at once.
        for model, _spans, _names in _TABLES:
            model._default_manager.using(using).all()._raw_delete(using)
        quote = connections[using].ops.quote_name
        shard, position, tallied, batch = map(quote, ("shard", "position", "tallied", "batch_id"))
        state_table, batch_table = quote(ShardState._meta.db_table), quote(Batch._meta.db_table)
        untallied = (
            f"{batch} NOT IN (SELECT {batch_table}.{quote('id')} FROM {batch_table} JOIN {state_table}"  # noqa: S608
            f" ON {state_table}.{shard} = {batch_table}.{shard}"
            f" WHERE {batch_table}.{position} > {state_table}.{tallied})"
        )
        _add_where(using, untallied, [], now)
