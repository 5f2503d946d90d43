"""Test that limits over a day or more outlive the data of Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ratelimits import rules
from ratelimits.embedded import EmbeddedServer
from tests.chaos.load import Load
from tests.support.entry_points import away
from tests.support.eventually import until
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)

#: The limit of each user in a month.
CAPACITY = 6


@pytest.fixture
def server(servers: TestServers, tmp_path: Path, settings: Any) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "redis", aof=True, binary=server_binary(servers.redis_kind))
    settings.RATELIMITS = {**settings.RATELIMITS, "TIMEOUT": 10, "DENY_CACHE_SECONDS": 0}
    try:
        away(settings, server.port)
        rules.forget()
        rule("monthly", "calendar_window", capacity=CAPACITY, key_kind="user", on_failure="deny")
        yield server
    finally:
        server.stop()
        rules.forget()


@pytest.mark.parametrize("drained", [True, False])
def test_flushall_admits_at_most_what_was_not_in_the_ledger(server: EmbeddedServer, drained: bool) -> None:
    admitted: Counter[str] = Counter()
    not_in_ledger: Counter[str] = Counter()
    with redis.Redis(port=server.port) as client:
        for seed, outcome, count in ((1, "admitted", 100), (2, "admitted", 100), (3, "refused", 30)):
            with Load(seed).running() as load:
                until(lambda: load.counted(outcome).total() >= count, f"{count} {outcome}")  # noqa: B023
            assert load.errors == []
            assert load.counted("denied").total() == 0
            admitted += load.counted("admitted")
            if seed < 3:
                if drained or seed == 1:
                    flow()
                else:
                    not_in_ledger = load.counted("admitted")
                client.flushall()
    print(
        f"\nFLUSHALL, {'drained' if drained else 'not drained'}: {admitted.total()} admitted to {len(admitted)} users"
    )
    assert not_in_ledger.total() > 0 or drained
    assert {user: count for user, count in admitted.items() if count > CAPACITY + not_in_ledger[user]} == {}
    assert max(admitted.values()) >= CAPACITY
