"""Write usage into Redis, in the form in which the script of a decision writes it. Also measure bare inserts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from django.db import connection
from django.db.models import QuerySet

from ratelimits.engine.assemble import scripts
from ratelimits.engine.keys import BIN_SECONDS, shard_of
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.connection import read_run
from ratelimits.models import Account, Plan, PlanInclusion
from ratelimits.usage.models import DurabilityGap, GapKind, Line

#: Maximum number of counters in each batch. The script of a decision seals a batch that has this number of fields.
FIELDS = 5_000
#: The end of a script that fills and seals a batch. The text of batch.lua comes before it. KEYS[1] is the open batch,
#: KEYS[2] the Redis key `meta` of the shard. ARGV[1] is the run, ARGV[2] a nonce, ARGV[3] the prefix of the Redis keys.
#: All further arguments are names of counters. Each counter counts one request.
_FILL = """
local open, meta = KEYS[1], KEYS[2]
local run, nonce, prefix = ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1e6 + time[2]
for i = 4, #ARGV do redis.call('HINCRBY', open, ARGV[i], 1) end
batch_open(prefix, nonce, run, now)
batch_seal(prefix, nonce, run, now)
redis.call('HSET', meta, 'sealed_at', string.format('%.0f', now))
return 1
"""


def _first_day() -> datetime:
    """Return the start of last month. All of its bins are in the past."""
    today = datetime.now(UTC)
    return (today.replace(day=1) - timedelta(days=1)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def month() -> str:
    """Return the month of the usage, which is last month, as `ratelimits_report` reads it: "2026-11"."""
    return f"{_first_day():%Y-%m}"


def _by_shard(first: int, count: int, keys: int, shards: int, per_account: int) -> dict[int, list[str]]:
    """Return, by shard, the names of the counters that become the `count` lines from the number `first` on.

    Lines are numbered from 0. The first `keys` lines are in the first bin of the month, one line for each key. The next
    `keys` lines are in the next bin, and so on.
    """
    start = int(_first_day().timestamp())
    out: dict[int, list[str]] = {}
    accounts = [f"acct-{key // per_account}" for key in range(keys)]
    # The shard of each key, and the end of its counters' names: account, key, and the cost of each request (1).
    endings = [
        (shard_of(f"account:{account}", shards), f"{account}|api_key:{key}|1") for key, account in enumerate(accounts)
    ]
    for number in range(first, first + count):
        shard, ending = endings[number % keys]
        bin_start = start + number // keys * BIN_SECONDS
        # A counter of admitted ("a") requests: bin, meter, id of the rule, and version of the rule.
        out.setdefault(shard, []).append(f"a|{bin_start}|requests|1|1|{ending}")
    return out


def fill(first: int, count: int, keys: int, per_account: int = 4) -> None:
    """Write the counters of `count` lines into sealed batches. `first` is the number of the first line."""
    server = current_server()
    client: Any = server.wire.client
    run, text = read_run(client), f"{scripts.read('batch').text.decode()}\n{_FILL}"
    for shard, counters in _by_shard(first, count, keys, server.keyspace.shards, per_account).items():
        for start in range(0, len(counters), FIELDS):
            names = counters[start : start + FIELDS]
            open_and_meta = server.keyspace.open(shard), server.keyspace.meta(shard)
            client.eval(text, 2, *open_and_meta, run, secrets.token_hex(12), server.keyspace.prefix(shard), *names)


def make_accounts(count: int) -> None:
    """Make one plan, and this number of accounts on it."""
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=3)
    numbers = iter(range(count))
    while chunk := list(islice(numbers, 2_000)):
        Account.objects.bulk_create([Account(identifier=f"acct-{number}", plan=plan) for number in chunk])
    # Let the rows and their history begin in 1970, so that they apply to last month.
    for model in (Account, Plan, PlanInclusion):
        QuerySet(model).update(since=0)
        model.history.update(since=0)


def declare_gaps(count: int, start: int, end: int) -> None:
    """Declare this number of gaps of one second, spread over the shards and over the time between two moments (µs)."""
    step = (end - start) // max(count, 1)
    shards = current_server().keyspace.shards
    DurabilityGap.objects.bulk_create(
        DurabilityGap(
            event=f"benchmark:{number}",
            kind=GapKind.RESTART,
            shard=number % shards,
            since=start + number * step,
            until=start + number * step + 1_000_000,
            fsync="everysec",
        )
        for number in range(count)
    )


def bare_insert_rate(count: int) -> float:
    """Return the lines per second of bare inserts into a copy of the ledger's table, by COPY (PostgreSQL) or INSERT."""
    table, columns = Line._meta.db_table, [field.column for field in Line._meta.concrete_fields]
    with connection.cursor() as cursor:
        names = ", ".join(map(str, columns))
        cursor.execute(f"SELECT {names} FROM {table} LIMIT {count}")
        rows = cursor.fetchall()
        if connection.vendor == "postgresql":
            cursor.execute(f"CREATE TABLE bare (LIKE {table} INCLUDING INDEXES)")
            text = "".join(["\t".join(map(str, row)) + "\n" for row in rows])
            start = time.perf_counter()
            with cursor.copy(f"COPY bare ({names}) FROM STDIN") as copy:
                copy.write(text)
        else:
            cursor.execute(f"CREATE TABLE bare AS SELECT * FROM {table} LIMIT 0")
            for number, indexed in enumerate(("id", "account, bin")):
                cursor.execute(f"CREATE INDEX bare_{number} ON bare ({indexed})")
            marks = ", ".join(["%s"] * len(columns))
            start = time.perf_counter()
            cursor.execute("BEGIN")
            for chunk in _chunks(rows):
                cursor.executemany(f"INSERT INTO bare ({names}) VALUES ({marks})", chunk)
            cursor.execute("COMMIT")
        elapsed = time.perf_counter() - start
        cursor.execute("DROP TABLE bare")
    return len(rows) / elapsed


def _chunks(rows: list[Any]) -> Iterator[list[Any]]:
    remaining = iter(rows)
    while chunk := list(islice(remaining, 2_000)):
        yield chunk
