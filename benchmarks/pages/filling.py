"""Fill a database for the benchmark of pages. Each statement writes many rows, because this takes less time.

The ledger looks as if it were compacted: each shard has one batch for each hour of 30 days. The lines and the totals
are correct, because the pages read them. The digests and the checksums are not correct, because no page verifies them.
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.models import Max, Min, Model

from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS, shard_of
from ratelimits.models import Account, KeyOverride, Name, Rule
from ratelimits.models.customers import make_missing
from ratelimits.models.periods import freeze
from ratelimits.usage.ledger import span_totals
from ratelimits.usage.models import (
    Batch,
    DurabilityGap,
    GapKind,
    KeyTotal,
    Line,
    PeriodUsage,
    ProcessTotal,
    RuleTotal,
    ShardState,
)
from ratelimits.usage.models.ledger import LINES_PER_BATCH

#: Number of hours in the ledger. The last of these hours is the present one.
HOURS = 30 * 24
#: Each account has this number of keys with usage.
_KEYS_PER_ACCOUNT = 4
#: The database gets one account for each 4 overrides, and one user for each 10 overrides.
_OVERRIDES_PER_ACCOUNT, _OVERRIDES_PER_USER = 4, 10
#: Maximum number of rows in one INSERT.
_ROWS = 5_000
#: Microseconds in a second.
_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of the database.

    lines      lines of the ledger
    keys       keys with usage. A tenth of the keys also have refused requests. Another tenth also have requests that a
               rule in shadow mode would refuse
    rules      rules that bill and refuse, each in a scope of its own
    overrides  overrides, each of a different API key
    """

    lines: int
    keys: int
    rules: int
    overrides: int


def fill(sizes: Sizes) -> dict[str, Any]:
    """Fill an empty database. Return the numbers of rows that follow from `sizes`, such as the number of batches."""
    now = int(time.time())
    make_configuration(sizes)
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA cache_size = -400000")  # 400 MB, only for this connection
            cursor.execute("PRAGMA synchronous = OFF")
    _write_lines(sizes, now)
    _write_states(now)
    _add_up(now)
    declare_outage(max(sizes.keys // 10, 1), now)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE")  # Autovacuum does this within a minute.
    assert Line.objects.count() == sizes.lines
    return {
        "accounts": Account.objects.count(),
        "batches": Batch.objects.count(),
        "totals of keys": KeyTotal.objects.count(),
        "totals of rules": RuleTotal.objects.count(),
        "totals of periods": PeriodUsage.objects.count(),
    }


def make_configuration(sizes: Sizes) -> None:
    """Make the rules, the overrides, the accounts and the users."""
    Rule.objects.bulk_create(
        Rule(name=f"rule{n}", algorithm="token_bucket", capacity=10, rate=5, period=1, scope=f"scope{n}")
        for n in range(sizes.rules)
    )
    for numbers in _portions(sizes.overrides):
        KeyOverride.objects.bulk_create(
            KeyOverride(key=f"api_key:{n}", rule=f"rule{n % sizes.rules}", capacity=20) for n in numbers
        )
    for numbers in _portions(max(sizes.overrides // _OVERRIDES_PER_ACCOUNT, 1)):
        Account.objects.bulk_create(Account(identifier=f"acct-{n}", name=f"Customer {n} Ltd") for n in numbers)
    for numbers in _portions(max(sizes.overrides // _OVERRIDES_PER_USER, 1)):
        User.objects.bulk_create(User(username=f"person{n}", email=f"person{n}@example.com") for n in numbers)


def _portions(count: int) -> Iterator[range]:
    """Yield the numbers from 0 up to `count` in ranges of at most _ROWS numbers."""
    for first in range(0, count, _ROWS):
        yield range(first, min(first + _ROWS, count))


def _table(model: type[Model]) -> str:
    """Return the name of the model's table, quoted for SQL."""
    return connection.ops.quote_name(model._meta.db_table)


def _write_lines(sizes: Sizes, now: int) -> None:
    """Write the lines hour by hour, and then their batches. Make the indexes at the end, which takes less time."""
    first_hour, shards = now // 3_600 - HOURS + 1, conf.SHARDS
    first_rule = Rule.objects.order_by("pk").values_list("pk", flat=True)[0]
    accounts = [f"acct-{number // _KEYS_PER_ACCOUNT}" for number in range(sizes.keys)]
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE benchmark_key (number BIGINT PRIMARY KEY, account TEXT, name TEXT, shard BIGINT)")
        rows = [
            (number, account, f"api_key:{number}", shard_of(f"account:{account}", shards))
            for number, account in enumerate(accounts)
        ]
        cursor.executemany("INSERT INTO benchmark_key VALUES (%s, %s, %s, %s)", rows)
    with connection.schema_editor() as schema:
        for index in Line._meta.indexes:
            schema.remove_index(Line, index)
    for hour in range(HOURS):
        # The numbers of the lines are in the order of time. This hour has the lines from number `first` to `end` - 1.
        first, end = (sizes.lines * edge // HOURS for edge in (hour, hour + 1))
        start = (first_hour + hour) * 3_600
        # `batch`, `kind`, `columns` and `count` are SQL. `batch` is the id of the batch (see `_write_batches`).
        batch = f"({hour * shards + 1} + k.shard)"
        # The kind of a line: 0 if its requests are admitted, 8 if they are refused, 9 if a rule in shadow mode would
        # refuse them. If the number of a key ends with 8 or 9, every second line of the key has the kind 8 or 9. The
        # rule of these lines is not the rule that bills the key.
        kind = f"CASE WHEN n / {sizes.keys} % 2 = 1 AND k.number % 10 >= 8 THEN k.number % 10 ELSE 0 END"
        # The columns from `id` to `bin` of the INSERT below. The id of a line is made from its batch and its number in
        # the batch. The lines of an hour are spread evenly over the four bins of the hour.
        columns = (
            f"{batch} * {LINES_PER_BATCH} + ROW_NUMBER() OVER (PARTITION BY k.shard ORDER BY k.account, k.name) - 1,"
            f" {batch}, k.account, k.name, 'requests',"
            f" {first_rule} + (k.number + CASE WHEN {kind} > 0 THEN 1 ELSE 0 END) % {sizes.rules}, 1,"
            f" {start} + (n - {first}) * 4 / {max(end - first, 1)} * {BIN_SECONDS}"
        )
        count = "k.number % 97 + 1"  # requests of a line: from 1 to 97
        admitted, denied, shadow = (f"CASE WHEN {kind} = {number} THEN {count} ELSE 0 END" for number in (0, 8, 9))
        with connection.cursor() as cursor:
            if end > first:
                cursor.execute(
                    f"WITH RECURSIVE numbers (n) AS (SELECT CAST({first} AS BIGINT) UNION ALL"
                    f" SELECT n + 1 FROM numbers WHERE n + 1 < {end})"
                    f" INSERT INTO {_table(Line)} (id, batch_id, account, key, meter, rule, version, bin,"
                    " admitted_requests, admitted_units, denied_requests, denied_units, refunded_requests,"
                    " refunded_units, shadow_requests, shadow_units, checksum)"
                    f" SELECT {columns}, {admitted}, {admitted}, {denied}, {denied}, 0, 0, {shadow}, {shadow}, 0"
                    f" FROM numbers JOIN benchmark_key k ON k.number = n % {sizes.keys}"
                )
    _write_batches(first_hour, shards)
    with connection.schema_editor() as schema:
        for index in Line._meta.indexes:
            schema.add_index(Line, index)
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE benchmark_key")


def _write_batches(first_hour: int, shards: int) -> None:
    """Write one batch for each hour and shard. The ledger starts `first_hour` hours after 1970 UTC."""
    hour, end = f"n / {shards} + 1", f"({first_hour + 1} + n / {shards}) * {3_600 * _MICROSECONDS}"
    # The number in 64 digits, as long as a digest.
    digest = f"SUBSTR('{'0' * 64}' || CAST({{0}} AS TEXT), LENGTH(CAST({{0}} AS TEXT)) + 1)"
    columns = {
        "id": "n + 1",
        "shard": f"n %% {shards}",
        "incarnation": f"'{'0' * 24}'",
        **dict.fromkeys(("seq", "first_seq", "position", "first_position"), hour),
        **dict.fromkeys(("previous_cum", "cum", "previous_requests"), "0"),
        "salt": f"'{'0' * 32}'",
        "content": digest.format("n"),
        "digest": digest.format("(n + 1)"),
        "opened_at": f"{end} - {3_600 * _MICROSECONDS}",
        "sealed_at": f"{end} - 1",
        **dict.fromkeys(("run", "sealed_run"), "'benchmark'"),
        "fence": "'always'",
        **dict.fromkeys(("previous_digest", "follows", "signature"), "''"),
        "line_count": "COALESCE(counted.lines, 0)",
        "applied_at": "CURRENT_TIMESTAMP",
        **dict.fromkeys(("parts", "part_salts"), "%s"),
    }
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE numbers (n) AS (SELECT CAST(0 AS BIGINT) UNION ALL"
            f" SELECT n + 1 FROM numbers WHERE n + 1 < {HOURS * shards}),"
            f" counted (batch, lines) AS (SELECT batch_id, COUNT(*) FROM {_table(Line)} GROUP BY batch_id)"
            f" INSERT INTO {_table(Batch)} ({', '.join(columns)}) SELECT {', '.join(columns.values())}"
            " FROM numbers LEFT JOIN counted ON counted.batch = n + 1",
            [b"", b""],
        )


def _write_states(now: int) -> None:
    """Write the state of each shard: all batches are tallied, and the watermark is now."""
    ShardState.objects.bulk_create(
        ShardState(
            shard=shard,
            run="benchmark",
            incarnation="0" * 24,
            seq=HOURS,
            position=HOURS,
            tallied=HOURS,
            watermark=now * _MICROSECONDS,
        )
        for shard in range(conf.SHARDS)
    )


def _month(start: int) -> tuple[int, int]:
    """Return the start and the end of the calendar month (s since 1970 UTC) that contains a moment."""
    first = datetime.fromtimestamp(start, UTC).replace(day=1, hour=0, minute=0, second=0)
    days = calendar.monthrange(first.year, first.month)[1]
    return int(first.timestamp()), int((first + timedelta(days=days)).timestamp())


def _add_up(now: int) -> None:
    """Calculate the totals of billing periods and of short spans from the lines."""
    sums = ("admitted_requests", "admitted_units", "denied_requests", "shadow_requests", "refunded_units")
    # SQL. The id of a batch contains its shard and its position: see `_write_batches`.
    shard, position = f"(batch_id - 1) % {conf.SHARDS}", f"(batch_id - 1) / {conf.SHARDS} + 1"
    make_missing(conf.DATABASE, Line.objects.order_by().values_list("account", flat=True).distinct())
    edges = Line.objects.aggregate(first=Min("bin"), last=Max("bin"))
    for period in sorted({_month(edges["first"])[0], _month(edges["last"])[0]}):
        _period_start, period_end = _month(period)
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {_table(PeriodUsage)} (account, period, meter, rule, {', '.join(sums)}, shard, position,"
                " period_end, customer_id)"
                f" SELECT account, {period}, meter, rule, {', '.join(f'SUM({name})' for name in sums)}, {shard},"
                f" MAX({position}), {period_end}, customer_id"
                f" FROM {_table(Line)} JOIN {_table(Name)} ON identifier = account"
                f" WHERE bin >= {period} AND bin < {period_end} GROUP BY account, meter, rule, {shard}, customer_id"
            )
    uses = list(PeriodUsage.objects.order_by().values_list("account", "period").distinct())
    with transaction.atomic():
        freeze(conf.DATABASE, uses)
    span_totals.rebuild(conf.DATABASE, now)


def declare_outage(keys: int, now: int) -> None:
    """Write unmetered requests of `keys` keys, in one hour of the last day. Declare the gaps of their accounts."""
    start = (now - 12 * 3_600) // BIN_SECONDS * BIN_SECONDS
    rows = [
        ProcessTotal(
            process=f"p{quarter}",
            kind="unmetered",
            account=f"acct-{key // _KEYS_PER_ACCOUNT}",
            key=f"api_key:{key}",
            meter="requests",
            bin=start + quarter * BIN_SECONDS,
            requests=key % 7 + 1,
            units=key % 7 + 1,
        )
        for key in range(keys)
        for quarter in range(4)
    ]
    ProcessTotal.objects.bulk_create(rows, batch_size=2_000)
    gaps = sorted({(row.account, row.bin) for row in rows})
    DurabilityGap.objects.bulk_create(
        [
            DurabilityGap(
                event=f"unmetered:{account}:{bin_}",
                kind=GapKind.UNMETERED,
                account=account,
                since=bin_ * _MICROSECONDS,
                until=(bin_ + BIN_SECONDS) * _MICROSECONDS,
                units=1,
            )
            for account, bin_ in gaps
        ],
        batch_size=2_000,
    )
