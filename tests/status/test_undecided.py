"""Test that the status page says so if failure policies decide, although Redis answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ratelimits.embedded import EmbeddedServer
from ratelimits.identity import Identity
from ratelimits.quota.checking import check
from ratelimits.status.fact import Fact, Level
from ratelimits.status.facts import facts
from ratelimits.usage.counting import process_totals
from ratelimits.usage.ledger.process_totals import write
from ratelimits.usage.models import ProcessTotal
from tests.support.entry_points import away, begin_afresh
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", None, "account:acme", None)


@pytest.fixture
def client(
    servers: TestServers, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[redis.Redis]:
    """Start a server for this test, whose rights the test may change."""
    begin_afresh(monkeypatch)
    server = EmbeddedServer(tmp_path / "redis", aof=False, binary=server_binary(servers.redis_kind))
    away(settings, server.port)
    try:
        with redis.Redis.from_url(server.url) as client:
            yield client
    finally:
        server.stop()


def failure() -> Fact:
    write(process_totals.process(), process_totals.totals())
    return next(fact for fact in facts() if fact.name == "failure")


def test_requests_that_a_server_refuses_to_decide_are_said_though_it_answers(client: redis.Redis) -> None:
    rule("open", scope="open", on_failure="allow")
    rule("closed", scope="closed", on_failure="deny")
    assert [check(WHO, scope).allowed for scope in ("open", "closed")] == [True, True]
    assert (failure().level, failure().word) == (Level.GREEN, "not active (allow)")
    client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
    for scope in ("open", "closed"):
        for _ in range(3):
            assert check(WHO, scope).allowed is (scope == "open")
    client.execute_command("ACL", "SETUSER", "default", "+evalsha", "+eval")
    fact = failure()
    assert (fact.level, fact.word) == (Level.AMBER, "decided 6 requests (allow)")
    assert "UTC these requests got no decision" in fact.detail
    ProcessTotal.objects.update(bin=0)  # as after half an hour
    process_totals._forget_all()
    assert failure().level is Level.GREEN


def test_a_request_with_several_meters_is_counted_once(client: redis.Redis) -> None:
    process_totals.add("unmetered", "acme", "user:1", {"requests": 1, "tokens": 9}, 2)
    process_totals.add("unmetered", "acme", "user:2", {"requests": 1}, 1)
    assert failure().word == "decided 3 requests (allow)"
