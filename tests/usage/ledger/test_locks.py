"""Test locks of shards, and a database whose transactions take their lock only at the first write, as SQLite's do."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import F

from ratelimits.billing.reports.closing.close import finalise
from ratelimits.usage.ledger import gaps, process_totals, resolve
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Batch, DurabilityGap, PeriodUsage, ProcessTotal, QuarantinedBatch, ShardState
from ratelimits.usage.models.gaps import GapChange, GapKind
from tests.support.reports.invoices import account, spend
from tests.support.usage.traffic import at, flow, use
from tests.usage.ledger.test_gaps import keys, put_back

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def others_write() -> Iterator[list[str]]:
    """After each statement of a transaction let another one write, unless the first has the lock; yield after which."""
    written: list[str] = []
    connection.ensure_connection()
    if connection.vendor != "sqlite":
        yield written
        return

    def write_after(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        result = execute(sql, params, many, context)
        if connection.in_atomic_block:
            try:
                other.execute(f"PRAGMA user_version = {len(written) + 1}")
            except sqlite3.OperationalError:
                pass
            else:
                written.append(sql)
        return result

    wrapper: Any = connection  # only SQLite has transaction_mode
    mode, wrapper.transaction_mode = wrapper.transaction_mode, "DEFERRED"
    other = sqlite3.connect(str(connection.settings_dict["NAME"]), timeout=0, isolation_level=None)
    try:
        with closing(other), connection.execute_wrapper(write_after):
            yield written
    finally:
        wrapper.transaction_mode = mode


def test_a_command_waits_for_a_shard_that_a_worker_has_locked() -> None:
    use()
    seal()
    drain()
    locked, released = threading.Event(), threading.Event()

    def work() -> None:
        with transaction.atomic(durable=True):
            ShardState.lock("default", Batch.objects.get().shard)
            locked.set()
            released.wait(30)
        connection.close()

    def command() -> None:
        call_command("ratelimits_finalise", "--open", stdout=StringIO())
        connection.close()

    with ThreadPoolExecutor(2) as pool:
        worker = pool.submit(work)
        assert locked.wait(30)
        ran = pool.submit(command)
        with suppress(TimeoutError):
            ran.result(timeout=0.2)  # without waiting it ends here, and the usage is in no total
        released.set()
        worker.result()
        ran.result()
    assert PeriodUsage.objects.count() == 1


@pytest.mark.parametrize("way", [resolve.accept, resolve.discard])
def test_a_quarantine_is_resolved_while_others_write(way: Callable[..., str], redis_client: redis.Redis) -> None:
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    fields: Any = redis_client.hgetall(key)
    flow()
    put_back(redis_client, key, fields, cum=4, count=2)
    drain()
    kept = QuarantinedBatch.objects.get()
    with others_write() as written:
        way("default", kept.pk, "ada")
    assert written == []


def test_usage_is_drained_added_up_and_joined_while_others_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "SPAN", 10**17)
    with others_write() as written:
        for _ in range(2):
            use()
            seal()
            drain()
        tally()
        ShardState.objects.update(watermark=F("watermark") + 2 * compacting.SPAN)
        assert [done.batches for done in compact()] == [2]
    assert written == []


def test_gaps_are_declared_and_extended_while_others_write() -> None:
    with others_write() as written:
        assert gaps.declare("default", GapKind.MISSING, "1", since=at("2026-10-01"), until=at("2026-10-02")) == 1
        gaps.extend("default", GapKind.MISSING, "1", at("2026-10-03"))
    assert written == []
    assert DurabilityGap.objects.get().until == at("2026-10-03")
    assert GapChange.objects.count() == 2


def test_a_gap_that_two_processes_declare_at_once_is_one() -> None:
    event: Any = {"kind": GapKind.MISSING, "event": "1", "since": at("2026-10-01"), "until": at("2026-10-02")}
    together = threading.Barrier(4)

    def declare() -> int:
        together.wait(30)
        try:
            return gaps.declare("default", **event)
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        declared = [pool.submit(declare) for _ in range(4)]
        assert sum(done.result() for done in declared) == 1
    assert (DurabilityGap.objects.count(), GapChange.objects.count()) == (1, 1)


def test_totals_are_folded_while_others_write() -> None:
    flow()
    about = {"kind": "admitted", "account": "acme", "key": "api_key:1", "meter": "requests", "bin": 0, "units": 1}
    for process in ("one", "two"):
        ProcessTotal.objects.create(process=process, requests=1, **about)
    with others_write() as written:
        assert process_totals.fold(int(time.time())) == 1
    assert written == []


def test_periods_are_closed_while_others_write() -> None:
    spend(account(), "2026-10-15")
    flow()
    ShardState.objects.update(watermark=at("2026-11-02"))
    with others_write() as written:
        assert len(finalise(at("2026-11-02"))) == 1
    assert written == []


def test_batches_are_archived_and_restored_while_others_write(tmp_path: Path) -> None:
    use()
    flow()
    with others_write() as written:
        pruned = archive._prune_shard("default", Batch.objects.get().shard, list(Batch.objects.all()), tmp_path)
        assert archive.restore("default", pruned.path) == 1
    assert written == []
