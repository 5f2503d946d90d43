"""Test that faults under load break no promise: no errors, no request too many, no usage lost or counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from ratelimits.embedded import EmbeddedServer
from ratelimits.usage.counting import process_totals
from tests.chaos.clocks import Clock, started_with
from tests.chaos.compared import row_of
from tests.chaos.faults import FAULTS, Fault, Place
from tests.chaos.load import Load
from tests.chaos.row import Row
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, own_breaker
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)

#: The server answers again at most this long after the end of a fault, in seconds.
BACK = 2.0
#: What other work of the machine may add to the longest time of a request, in seconds.
SLACK = 1.0
#: The faults that run without `--long`.
SAMPLE = {
    "`kill -9` of the server",
    "idle connections dropped without a word",
    "connections end in the middle of a reply",
    "no space for the append-only file (`always`)",
    "SQLite locked for writing",
    "PostgreSQL away for 60 s",
    "50 edits a second",
}


def _cases() -> Iterator[Any]:
    for fault in FAULTS:
        if fault.vendor in ("", connection.vendor):
            marks = [] if fault.name in SAMPLE else [pytest.mark.long]
            if fault.clock == "server":
                marks.append(pytest.mark.system)
            yield pytest.param(fault, marks=marks, id=f"{fault.clock}{fault.make.__name__}")


@pytest.fixture(params=_cases())
def fault(request: pytest.FixtureRequest) -> Fault:
    made: Fault = request.param
    return made


@pytest.fixture
def place(
    fault: Fault,
    servers: TestServers,
    tmp_path: Path,
    settings: Any,
    long_run: bool,
    load_rules: None,
    process_environment: Callable[[], dict[str, str]],
) -> Iterator[Place]:
    """Start a server that may be killed, and a proxy in front of it. Yield the place for a fault."""
    clock = Clock(tmp_path) if fault.clock else None
    of_server = clock.environment if clock is not None and fault.clock == "server" else {}
    of_processes = {"CHAOS_CLOCK": str(clock.file)} if clock is not None and fault.clock == "processes" else {}
    binary = started_with(server_binary(servers.redis_kind), tmp_path, of_server)
    server = EmbeddedServer(tmp_path / "redis", aof=True, binary=binary, options={"appendfsync": "always"})
    try:
        with Proxy(server.port) as proxy:
            away(settings, proxy.port)
            load = Load(20261, environment={**process_environment(), **of_processes})
            seconds = fault.seconds if long_run else 1.0
            yield Place(servers, server, proxy, tmp_path, load, seconds, clock, [])
    finally:
        server.stop()


def _at(server: EmbeddedServer) -> dict[str, Any]:
    backend = "django_redis.cache.RedisCache"
    return {
        name: {"BACKEND": backend, "LOCATION": f"{server.url[:-1]}{number}"}
        for number, name in enumerate(("ratelimits", "default"))
    }


def test_a_fault_breaks_no_promise(
    fault: Fault, place: Place, monkeypatch: pytest.MonkeyPatch, long_run: bool, reliability: Callable[[Row], None]
) -> None:
    own_breaker(monkeypatch)
    process_totals._forget_all()
    with override_settings(CACHES=_at(place.server)):
        flow()  # The ledger learns in which run the server is, so that it can tell a restart.
    with place.load.running() as load:
        load.wait_for_all_keys()
        fault.make(place)
        ended = time.monotonic()
        load.wait(BACK + 0.5)
    with override_settings(CACHES=_at(place.server)):
        row = row_of(fault.name, load, ended, place.ahead if fault.clock == "server" else ())
    reliability(row)
    assert (row.errors, row.over, row.under, row.lost, row.doubled) == (0, 0, 0, 0, 0), load.errors[:3]
    assert row.declared or not row.unknown
    if long_run:
        assert row.worst <= fault.longest + SLACK
        assert row.back <= BACK
    if fault.reachable:
        assert load.counted("denied").total() + load.counted("passed").total() == 0
