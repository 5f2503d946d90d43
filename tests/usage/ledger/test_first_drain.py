"""Test that what Redis loses before anything was drained is declared."""

from __future__ import annotations

import time

import pytest
from django.db import OperationalError, connection

from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.billing.reports.gaps import Gaps
from ratelimits.embedded import EmbeddedServer
from ratelimits.models.accounts.named import named_now
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.usage.counting import process_totals
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import DurabilityGap, Line, ProcessTotal, ShardState
from ratelimits.usage.periods import SECOND
from tests.support.raw import RawRedis
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)


def counted(requests: int) -> None:
    """Count requests in Redis, at this moment, and in the totals of this process."""
    for _ in range(requests):
        use(now=None)
        process_totals.admitted("account:acme", {"requests": 1}, int(time.time()) * SECOND)


def wipes(account: str = "acme") -> list[DurabilityGap]:
    return list(DurabilityGap.objects.filter(kind="wipe", shard=home_shard(account)).order_by("pk"))


def in_ledger() -> int:
    return sum(Line.objects.values_list("admitted_requests", flat=True))


def test_a_wipe_before_the_first_drain_is_declared_from_the_first_request_on(redis_client: RawRedis) -> None:
    before = time.time_ns() // 1000
    counted(5)
    process_totals.write()
    seal()
    redis_client.flushall()
    counted(3)
    seal()
    drain()
    assert in_ledger() == 3
    (gap,) = wipes()
    assert gap.since <= before < gap.until <= time.time_ns() // 1000
    assert gap.since == min(ProcessTotal.objects.values_list("bin", flat=True)) * SECOND
    acme = named_now("default", ["acme"])["acme"]
    assert "wipe" in Gaps.between("default", before, before + 1).text([home_shard("acme")], acme, before, before + 1)
    assert {fact.name: fact for fact in facts()}["gaps"].level is Level.AMBER
    seal()
    drain()
    assert wipes() == [gap]


def test_two_wipes_before_and_between_drains_are_two_gaps(redis_client: RawRedis) -> None:
    seal()
    redis_client.flushall()
    seal()
    drain()
    counted(1)
    redis_client.flushall()
    seal()
    drain()
    assert len(wipes()) == 2


def test_a_wipe_is_declared_once_if_a_full_batch_comes_before_the_next_seal(redis_client: RawRedis) -> None:
    seal()
    redis_client.flushall()
    # 1,000 fields fill a batch, so a request seals it.
    for number in range(1_001):
        use(key=f"api_key:{number}", now=None)
    drain()
    assert in_ledger() > 0
    assert len(wipes()) == 1
    seal()
    drain()
    assert in_ledger() == 1_001
    assert len(wipes()) == 1


def test_a_restart_before_the_first_drain_is_declared(everysec_server: EmbeddedServer) -> None:
    use(now=None)
    seal()
    everysec_server.kill()
    everysec_server.start()
    use(now=None)
    seal()
    drain()
    gap = DurabilityGap.objects.get(kind="restart")
    assert not gap.harmless
    assert gap.since == min(ShardState.objects.values_list("first_sealed", flat=True)) < gap.until


def test_nothing_is_declared_if_nothing_was_lost_before_the_first_drain() -> None:
    counted(2)
    for _ in range(3):
        seal()
    counted(2)
    for _ in range(2):
        seal()
        drain()
    assert in_ledger() == 4
    assert not DurabilityGap.objects.exists()


def refuse(*_statement: object) -> None:
    raise OperationalError("the database does not answer")


def test_the_next_seal_notes_the_first_one_if_the_database_did_not_answer(redis_client: RawRedis) -> None:
    with connection.execute_wrapper(refuse):
        seal()
    assert not ShardState.objects.exists()
    seal()
    assert ShardState.objects.get(shard=home_shard("acme")).first_sealed > 0
    redis_client.flushall()
    seal()
    drain()
    assert len(wipes()) == 1
