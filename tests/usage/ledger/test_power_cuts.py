from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from django.db import connection
from django.test import override_settings
from redis import Redis
from redis.exceptions import RedisError

from ratelimits.billing.reports.statements import rows, statements
from ratelimits.embedded import EmbeddedServer, valkey_binary
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import DurabilityGap, QuarantinedBatch
from tests.support.plain import PLAIN
from tests.support.usage.load import Load
from tests.support.usage.power import Fsyncs, stalled_disk, unwritten
from tests.support.usage.traffic import flow
from tests.usage.ledger.conftest import on_server

pytestmark = pytest.mark.django_db(transaction=True)

WITHOUT_FENCE = {**PLAIN, "FENCE": "none"}


@contextmanager
def draining() -> Iterator[None]:
    """Seal and drain without end in a thread, until the block is left."""
    end = threading.Event()

    def run() -> None:
        try:
            while not end.is_set():
                try:
                    flow()
                except (RedisError, NotFencedError):
                    time.sleep(0.02)
                time.sleep(0.05)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def cut_power(server: EmbeddedServer, seed: int, cuts: int) -> list[tuple[int, Load]]:
    """Cut the power under traffic; return the time of each cut (µs), and the usage before it, under separate keys."""
    rng, loads, lost = random.Random(seed), [], []
    flow()
    for number in range(cuts):
        load = Load(seed + number, threads=2, label=f"cut-{number}-")
        with Fsyncs(server) as fsyncs, draining(), load:
            time.sleep(rng.uniform(0.3, 1.2))
            cut = fsyncs.cut(rng.uniform(0.1, 0.8))
            lost.append(cut.lost)
            loads.append((cut.at, load))
    flow()
    print(f"\nseed {seed}: {cuts} cuts, bytes lost at each: {lost}")
    return loads


def forks() -> Counter[str]:
    """Return the batches that came again with other contents than the ledger has."""
    kinds = Counter(DurabilityGap.objects.filter(kind="fork").values_list("kind", flat=True))
    return kinds + Counter(quarantined=QuarantinedBatch.objects.count())


def declared_at(printed: str) -> list[tuple[int, int]]:
    """Return the spans (µs) in which usage may be missing, by the restarts that report lines print."""
    spans = re.findall(r"restart (\S+)/(\S+) appendfsync=everysec", printed)
    return [(at(since), at(until)) for since, until in spans]


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 10**6)


@pytest.fixture
def everysec_valkey(tmp_path: Path) -> Iterator[EmbeddedServer]:
    options = {"appendfsync": "everysec", "auto-aof-rewrite-percentage": "0"}
    server = EmbeddedServer(tmp_path / "valkey", aof=True, binary=valkey_binary(), options=options)
    try:
        with on_server(server):
            yield server
    finally:
        server.stop()


def test_a_power_cut_never_bills_too_much_and_what_it_lost_is_declared(
    everysec_valkey: EmbeddedServer, crashes: Callable[[int, int], int], crash_seed: int
) -> None:
    loads = cut_power(everysec_valkey, crash_seed + 3, crashes(3, 24))
    assert not forks()
    missing = [load.missing(at_most=True) for _at, load in loads]
    print(f"  units that were acknowledged before each cut and are missing: {missing}")
    assert any(missing), "none of the cuts lost anything: they prove nothing"
    assert list(verify_ledger("default")) == []
    declared = DurabilityGap.objects.filter(kind="restart", fsync="everysec")
    used = [row for row in rows(statements(time.strftime("%Y-%m", time.gmtime()))) if row.consumed_quantity]
    for number, (cut_at, load) in enumerate(loads):
        if not load.missing():
            continue
        # For every shard, because each may have lost something.
        assert declared.filter(since__lte=cut_at, until__gte=cut_at, shard=None, shards="", harmless=False).exists()
        lines = [row for row in used if row.key.startswith(f"api_key:cut-{number}-")]
        assert lines
        for row in lines:
            spans = declared_at(row.durability_gap)
            assert any(since <= cut_at <= until for since, until in spans), row


def test_what_the_server_has_not_written_yet_is_not_taken_for_fsynced(everysec_valkey: EmbeddedServer) -> None:
    with Fsyncs(everysec_valkey) as fsyncs:
        with stalled_disk(everysec_valkey), Redis.from_url(everysec_valkey.url) as client:
            unwritten(everysec_valkey, client)
            fsyncs.look(ran=True)  # it also runs to begin waiting for the disk
        assert fsyncs.cut(0).lost >= 0


def test_without_the_fence_the_same_cuts_fork_batches(
    everysec_valkey: EmbeddedServer, crashes: Callable[[int, int], int], crash_seed: int
) -> None:
    cuts = crashes(3, 24)
    with override_settings(RATELIMITS=WITHOUT_FENCE):
        cut_power(everysec_valkey, crash_seed + 3, cuts)
        # A few cuts do not always hit a batch that was drained and not yet fsynced.
        while not forks() and cuts < 24:
            cut_power(everysec_valkey, crash_seed + 3 + cuts, 3)
            cuts += 3
    print(f"  forks: {dict(forks())}")
    assert forks()
