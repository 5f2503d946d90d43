"""Make a large ledger for the benchmarks of pages. Batches are written as a drain does, but do not come from Redis."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from django.db import transaction

from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS, shard_of
from ratelimits.models import DurabilityGap, GapKind, KeyOverride, ProcessTotal, Rule, ShardState
from ratelimits.usage.apply import insert
from ratelimits.usage.packet import Packet, canonical, content_digest

#: Number of lines of one batch, and number of days over which the lines are spread.
BATCH, DAYS = 5_000, 30
_MICROSECONDS = 1_000_000


def make_rules(count: int) -> list[int]:
    """Make this number of rules. Return their primary keys."""
    for number in range(count):
        Rule.objects.create(
            name=f"rule{number}", algorithm="token_bucket", capacity=10, rate=5, period=1, scope=f"scope{number}"
        )
    return list(Rule.objects.order_by("pk").values_list("pk", flat=True))


def make_overrides(count: int, rules: int) -> None:
    """Make so many overrides, each of another API key, spread over the rules of `make_rules`."""
    for start in range(0, count, BATCH):
        KeyOverride.objects.bulk_create(
            KeyOverride(key=f"api_key:{number}", rule=f"rule{number % rules}", capacity=20)
            for number in range(start, min(start + BATCH, count))
        )


def fill_ledger(lines: int, keys: int, rules: list[int], per_account: int = 4) -> None:
    """Write this number of lines, spread evenly over 30 days, shards, accounts, keys and rules.

    Each hour has all keys. Of ten lines, one is of refused requests, and one of requests that a shadow rule would have
    refused.
    """
    run, incarnation, waiting = secrets.token_hex(20), secrets.token_hex(12), dict[int, list[bytes]]()
    states = {shard: ShardState(shard=shard, run=run, incarnation=incarnation) for shard in range(conf.SHARDS)}
    ShardState.objects.bulk_create(states.values())
    for shard, line in _lines(lines, keys, rules, per_account):
        batch = waiting.setdefault(shard, [])
        batch.append(line)
        if len(batch) == BATCH:
            _apply(states[shard], waiting.pop(shard))
    for shard, batch in waiting.items():
        _apply(states[shard], batch)
    now = int(time.time()) * _MICROSECONDS
    ShardState.objects.update(watermark=now)


def _lines(lines: int, keys: int, rules: list[int], per_account: int) -> Iterator[tuple[int, bytes]]:
    end = int(time.time()) // BIN_SECONDS
    first, total = end - DAYS * 86_400 // BIN_SECONDS + 1, DAYS * 86_400 // BIN_SECONDS
    accounts = [f"acct-{key // per_account}" for key in range(keys)]
    shards = [shard_of(f"account:{name}", conf.SHARDS) for name in accounts]
    rounds = max(-(-lines // keys), 1)
    for number in range(lines):
        key, step = number % keys, number // keys
        # The lines of the last round are of now, the others are spread over the time before.
        start = (first + total - 1 - (rounds - 1 - step) * total // rounds) * BIN_SECONDS
        count = key % 97 + 1
        admitted, denied, shadow = (count, 0, 0) if number % 10 < 8 else (0, count, 0) if number % 10 < 9 else (0, 0, 1)
        counts = (admitted, admitted, denied, denied, 0, 0, shadow, shadow)
        rule, period = rules[(key + number % 10) % len(rules)], first * BIN_SECONDS
        yield shards[key], canonical([accounts[key], f"api_key:{key}", "requests", rule, 1, period, start, *counts])


def _apply(state: ShardState, lines: list[bytes]) -> None:
    lines.sort()
    now, seq = int(time.time()) * _MICROSECONDS, state.seq + 1
    header = (state.shard, state.incarnation, seq, state.cum, state.cum, now, now, state.run, state.run, "")
    packet = Packet(*header, lines=tuple(lines), content=content_digest(header, lines))
    with transaction.atomic():
        insert("default", state, packet, "always")
        state.seq = seq
        state.save()


def declare_outage(keys: int, per_account: int = 4) -> None:
    """Write requests that the failure policy let through in an hour of yesterday, and declare the gaps."""
    start = int(time.time() - 86_400 / 2) // BIN_SECONDS * BIN_SECONDS
    rows = [
        ProcessTotal(
            process=f"p{bin_}",
            kind="unmetered",
            account=f"acct-{key // per_account}",
            key=f"api_key:{key}",
            meter="requests",
            bin=start + bin_ * BIN_SECONDS,
            requests=key % 7 + 1,
            units=key % 7 + 1,
        )
        for key in range(keys)
        for bin_ in range(4)
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
