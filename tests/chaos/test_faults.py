"""Test that faults under load break no promise: no errors, no request too many, no usage lost or counted twice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db.models import Sum
from django.test import override_settings

from ratelimits import rules
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.transport.breaker import Breaker
from ratelimits.models import Line
from ratelimits.quota import checking, process_totals
from tests.chaos.faults import FAULTS, Fault, Place
from tests.chaos.load import TIGHT, WIDE, Load
from tests.chaos.row import Row
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)

#: The limit that all requests of the scope TIGHT share.
CAPACITY, RATE = 20, 50
#: The server answers again at most this long after the end of a fault, in seconds.
BACK = 2.0
#: The setting TIMEOUT, and what other work of the machine may add to it, in seconds.
TIMEOUT, SLACK = 0.25, 1.0
#: The setting TIMEOUT in the sample, which may run on a busy machine.
PATIENT = 10
#: The faults that run without `--long`.
SAMPLE = {"`kill -9` of the server", "connections end in the middle of a reply", "50 edits a second"}


@pytest.fixture
def place(servers: TestServers, tmp_path: Path, settings: Any, long_run: bool) -> Iterator[Place]:
    """Start a server that may be killed, a proxy in front of it, and the rules. Yield the place for a fault."""
    options = {"appendfsync": "always"}
    server = EmbeddedServer(tmp_path / "redis", aof=True, binary=server_binary(servers.redis_kind), options=options)
    settings.RATELIMITS = {
        **settings.RATELIMITS,
        "TIMEOUT": TIMEOUT if long_run else PATIENT,
        "DENY_CACHE_SECONDS": 0,
        "RELOAD_INTERVAL": 1,
    }
    try:
        with Proxy(server.port) as proxy:
            away(settings, proxy.port)
            rules.forget()
            rule(TIGHT, capacity=CAPACITY, rate=RATE, period=1, scope=TIGHT, key_kind="global", on_failure="deny")
            rule(WIDE, capacity=1_000_000, rate=1_000_000, period=1, scope=WIDE, key_kind="user", on_failure="allow")
            rule("storm", capacity=1_000_000, rate=1_000_000, period=1, scope=WIDE, on_failure="allow")
            yield Place(server, proxy, tmp_path, Load(20261), 5.0 if long_run else 1.0)
    finally:
        server.stop()
        rules.forget()


def row_of(fault: Fault, place: Place, ended: float) -> Row:
    """Bring the usage to the ledger, and compare it with the answers."""
    load, server = place.load, place.server
    with override_settings(CACHES=_at(server)):
        flow()
    unknown: Counter[str] = Counter()
    for total, (requests, _units) in process_totals.totals().items():
        if total.kind == "unanswered":
            unknown[total.key] += requests
    sums = Line.objects.values("key").annotate(units=Sum("admitted_units")).order_by()
    ledger = {line["key"]: line["units"] for line in sums}
    admitted = load.counted("admitted")
    keys = admitted.keys() | ledger.keys()
    moments = sorted(one.at for one in load.requests if one.outcome == "admitted" and one.scope == TIGHT)
    span = (moments[-1] - moments[0]) / 1_000_000
    undecided = [one.began - ended for one in load.requests if one.outcome in ("passed", "denied", "raised")]
    return Row(
        fault.name,
        len(load.requests),
        len(load.errors),
        load.counted("denied").total(),
        max(one.seconds for one in load.requests),
        max(len(moments) - int(CAPACITY + RATE * span), 0),
        sum(max(admitted[key] - ledger.get(key, 0), 0) for key in keys),
        sum(max(ledger.get(key, 0) - admitted[key] - unknown[key], 0) for key in keys),
        unknown.total(),
        max([0.0, *undecided]),
    )


def _at(server: EmbeddedServer) -> dict[str, Any]:
    backend = "django_redis.cache.RedisCache"
    return {
        name: {"BACKEND": backend, "LOCATION": f"{server.url[:-1]}{number}"}
        for number, name in enumerate(("ratelimits", "default"))
    }


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=[] if one.name in SAMPLE else [pytest.mark.long], id=one.make.__name__) for one in FAULTS],
)
def test_a_fault_breaks_no_promise(
    fault: Fault, place: Place, monkeypatch: pytest.MonkeyPatch, long_run: bool, reliability: list[Row]
) -> None:
    monkeypatch.setattr(checking, "breaker", Breaker(time.monotonic))
    process_totals._begin()
    with place.load.running() as load:
        load.wait(0.5)
        fault.make(place)
        ended = time.monotonic()
        load.wait(BACK + 0.5)
    row = row_of(fault, place, ended)
    print(f"\n{row}")
    reliability.append(row)
    assert (row.errors, row.over, row.lost, row.doubled) == (0, 0, 0, 0), load.errors[:3]
    if long_run:
        assert row.worst <= TIMEOUT + SLACK
        assert row.back <= BACK
    if fault.reachable:
        assert load.counted("denied").total() + load.counted("passed").total() == 0
