"""Compare the clients' counts with the ledger, for each API key. The ledger is in the database."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from django.db.models import Sum
from django_redis import get_redis_connection
from rich.box import SIMPLE_HEAD
from rich.table import Table

from project.demo.seed import IssuedKey
from project.demo.traffic import ClientCounts
from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard
from ratelimits.quota.deny_cache import INTERVAL
from ratelimits.usage.models import Line, ShardState


@dataclass(frozen=True)
class Row:
    """The counts of one API key: `seen` by its clients, and in the ledger (`admitted`, `denied`, `tokens`)."""

    name: str
    seen: ClientCounts
    admitted: int
    denied: int
    tokens: int

    @property
    def difference(self) -> int:
        """Return by how much this key's counts are wrong. If the result is above 0, the demo has failed.

        It is the sum of three things: the differences between the clients and the ledger, the number of responses with
        another status than 200 and 429, and the number of requests without a response.
        """
        return (
            abs(self.seen.admitted - self.admitted)
            + abs(self.seen.denied - self.denied)
            + abs(self.seen.tokens - self.tokens)
            + self.seen.other
            + self.seen.unanswered
        )


def compare(keys: list[IssuedKey], client_counts: dict[str, ClientCounts]) -> list[Row]:
    """Return one row for each API key. `client_counts` are the counts of the clients, by key."""
    ledger = {
        (line["key"], line["meter"]): (line["units"], line["denied"])
        for line in Line.objects.filter(key__in=client_counts)
        .values("key", "meter")
        .order_by()
        .annotate(units=Sum("admitted_units"), denied=Sum("denied_requests"))
    }
    rows = []
    for key in keys:
        admitted, denied = ledger.get((key.key, "requests"), (0, 0))
        tokens, _ = ledger.get((key.key, "tokens"), (0, 0))
        rows.append(Row(key.name, client_counts[key.key], admitted, denied, tokens))
    return rows


def wait_for_ledger(keys: list[IssuedKey], seconds: float) -> None:
    """Wait until the ledger contains all usage of these keys, for at most this number of seconds.

    Also wait until each shard was drained once. Before the first drain of a shard, reports say that usage may be
    missing.
    """
    now, microseconds = get_redis_connection(conf.CACHE_ALIAS).time()
    # A process repeats some refusals from memory, and reports their number to Redis every INTERVAL seconds. Two
    # intervals from now, all numbers are reported. So wait until each shard's watermark has reached this moment. It is
    # in µs by the clock of Redis.
    moment = now * 1_000_000 + microseconds + int(2 * INTERVAL * 1_000_000)
    shards = {account_shard(key.account, conf.SHARDS) for key in keys}
    complete = ShardState.objects.filter(shard__in=shards, watermark__gte=moment)
    drained = ShardState.objects.filter(shard__lt=conf.SHARDS, watermark__gt=0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (complete.count() < len(shards) or drained.count() < conf.SHARDS):
        time.sleep(0.1)


def table(rows: list[Row]) -> Table:
    """Return the comparison as a table, first with the counts of the clients, then with the counts of the ledger."""
    result = Table(
        title="Clients: sent, 200, 429, tokens | ledger: admitted, denied, tokens",
        box=SIMPLE_HEAD,
        show_footer=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    result.add_column("API key", "all", no_wrap=True)
    columns: tuple[tuple[str, Callable[[Row], int]], ...] = (
        ("sent", lambda row: row.seen.sent),
        ("200", lambda row: row.seen.admitted),
        ("429", lambda row: row.seen.denied),
        ("tokens", lambda row: row.seen.tokens),
        ("admitted", lambda row: row.admitted),
        ("denied", lambda row: row.denied),
        ("tokens", lambda row: row.tokens),
        ("diff", lambda row: row.difference),
    )
    for heading, count in columns:
        total = sum(map(count, rows))
        result.add_column(heading, f"{total:,}", justify="right", no_wrap=True)
    for row in rows:
        counts = [f"{count(row):,}" for _, count in columns]
        result.add_row(row.name, *counts, style="red" if row.difference else None)
    return result
