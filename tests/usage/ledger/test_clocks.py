"""Test a server whose clock was ahead: what it counted is declared, and closes no period."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import redis
from django.core import checks
from django.db import OperationalError, connection

from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.close import finalise, home_shard
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.assemble import scripts
from ratelimits.engine.server import current_server
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import DurabilityGap, ShardState
from tests.support.raw import RawRedis
from tests.support.reports.invoices import account, spend
from tests.support.rows import rule
from tests.support.usage.traffic import at, use

pytestmark = pytest.mark.django_db(transaction=True)

JUNE = at("2027-06-01")


def seal_at(moment: int, clock: int | str = "") -> None:
    """Seal every shard as a server whose clock shows this moment would do, for a caller with another clock."""
    server, text = current_server(), scripts.read("memory/full", "run", "batch", "seal").text.decode()
    for shard in range(server.keyspace.shards):
        client = server.wire.client_of(server.keyspace, shard)
        client.eval(text, 1, server.keyspace.meta(shard), secrets.token_hex(12), str(moment), str(clock))


def drain_at(moment: str) -> None:
    """Drain like a machine whose clock shows a time like "2026-11-28T12:00"."""
    drain(at(moment))
    tally()


def state() -> ShardState:
    return ShardState.objects.get(shard=home_shard("acme"))


def declared() -> list[tuple[int, int]]:
    """Return the spans of the declared gaps of the only shard in use."""
    gaps = DurabilityGap.objects.filter(kind="clock", shard=home_shard("acme")).order_by("since")
    return list(gaps.values_list("since", "until"))


@pytest.mark.parametrize("idle", [False, True], ids=["with usage", "without"])
def test_a_seal_that_is_ahead_moves_no_watermark_and_is_declared_until_both_clocks_agree(idle: bool) -> None:
    seal_at(at("2026-11-28T11:00"))
    drain_at("2026-11-28T11:00")
    if not idle:
        use(now=JUNE)
    seal_at(JUNE)
    drain_at("2026-11-28T12:00")
    lead = JUNE - at("2026-11-28T12:00")
    assert (state().watermark, state().ahead) == (at("2026-11-28T11:00"), lead)
    noon = (at("2026-11-28T11:00"), at("2026-11-28T12:00"))
    assert declared() == [noon, (noon[0] + lead, JUNE)]
    drain_at("2026-11-28T12:30")
    assert len(declared()) == 2
    seal_at(at("2026-11-28T13:00"))
    drain_at("2026-11-28T13:00")
    assert (state().watermark, state().ahead) == (at("2026-11-28T13:00"), 0)
    one = (at("2026-11-28T11:00"), at("2026-11-28T13:00"))
    assert declared() == [one, (one[0] + lead, one[1] + lead)]
    seal_at(at("2026-11-28T14:00"))
    drain_at("2026-11-28T14:00")
    assert state().watermark == at("2026-11-28T14:00")
    assert len(declared()) == 2


def test_a_clock_that_was_ahead_is_noticed_by_a_drain_that_comes_after_the_time_it_showed() -> None:
    seal_at(at("2026-11-28T11:00"), at("2026-11-28T11:00"))
    drain_at("2026-11-28T11:00")
    seal_at(at("2026-11-28T14:00"), at("2026-11-28T12:00"))
    drain_at("2026-11-28T15:00")
    assert (state().watermark, state().ahead) == (at("2026-11-28T11:00"), 2 * 3600 * 10**6)
    assert declared()[0] == (at("2026-11-28T11:00"), at("2026-11-28T15:00"))
    seal_at(at("2026-11-28T15:30"), at("2026-11-28T15:30"))
    drain_at("2026-11-28T15:30")
    assert (state().watermark, state().ahead) == (at("2026-11-28T15:30"), 0)


def test_the_first_drain_of_all_meets_a_clock_that_is_ahead() -> None:
    for moment in ("2026-11-28T12:00", "2026-11-28T12:01"):
        seal_at(JUNE)
        drain_at(moment)
    assert (state().watermark, len(declared())) == (0, 2)
    seal_at(at("2026-11-28T13:00"))
    drain_at("2026-11-28T13:00")
    assert (state().watermark, len(declared())) == (at("2026-11-28T13:00"), 2)


def test_data_that_a_clock_ahead_sealed_first_was_not_wiped() -> None:
    seal_at(JUNE)
    for moment in ("2026-11-28T12:00", "2026-11-28T12:01"):
        seal_at(at(moment))
        drain_at(moment)
    seal_at(JUNE + 1)
    drain_at("2027-06-01T00:00:01")
    assert not DurabilityGap.objects.filter(kind="wipe").exists()


def test_clocks_that_differ_by_seconds_are_right() -> None:
    seal_at(at("2026-11-28T12:00:59"))
    drain_at("2026-11-28T12:00:00")
    assert state().watermark == at("2026-11-28T12:00:59")
    assert declared() == []


def test_a_period_is_closed_once_although_the_clock_was_ahead_in_its_last_days() -> None:
    acme = account()
    spend(acme, "2026-11-27", 7)
    seal_at(JUNE)
    drain_at("2026-11-28T12:00")
    for day in ("2026-11-28T13:00", "2026-11-29", "2026-11-30"):
        spend(acme, day, 1)
        seal_at(at(day))
        drain_at(day)
        assert finalise(at(day)) == []
    spend(acme, "2026-11-30T23:59", 1)
    # A worker was away at the end of the month: the usage that it still has to drain has the right time.
    assert finalise(at("2026-12-02")) == []
    seal_at(at("2026-12-02"))
    drain_at("2026-12-02")
    assert len(finalise(at("2026-12-02"))) == 1
    assert finalise(at("2026-12-05")) == []
    report = Report.objects.get()
    assert sum(report.lines.values_list("consumed_quantity", flat=True)) == 11
    assert report.gaps.startswith("clock 2026-11-28T12:00:00Z/2026-11-28T13:00:00Z")


def test_a_watermark_that_two_wrong_clocks_stored_is_put_back_and_declared() -> None:
    acme = account()
    spend(acme, "2026-11-27", 7)
    seal_at(at("2026-11-28T11:00"))
    drain_at("2026-11-28T11:00")
    seal_at(JUNE)
    drain_at("2027-06-01")
    assert (state().watermark, declared()) == (JUNE, [])
    assert finalise(at("2026-12-02")) == [], "no clock has been there yet"
    (found,) = open_periods(at("2026-12-02"))
    assert "which is in the future" in found.why
    seal_at(at("2026-11-28T12:00"))
    drain_at("2026-11-28T12:00")
    assert state().watermark == at("2026-11-28T12:00")
    assert declared()[0] == (at("2026-11-28T11:00"), at("2026-11-28T12:00"))
    drain_at("2026-11-28T12:01")
    assert len(declared()) == 2


def test_a_watermark_that_is_put_back_covers_no_usage_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    acme = account()
    spend(acme, "2026-11-27", 7)
    seal_at(at("2026-11-28T11:00"))
    drain_at("2026-11-28T11:00")
    seal_at(JUNE)
    drain_at("2027-06-01")
    spend(acme, "2026-11-29", 5)
    seal_at(at("2026-12-02"), at("2026-12-02"))

    def reached(point: str) -> None:
        if point == "drain:read":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(crash, "reached", reached)
        with pytest.raises(KeyboardInterrupt):
            drain_at("2026-12-02")
    assert state().watermark == at("2026-11-28T11:00")
    assert finalise(at("2026-12-02")) == []
    drain_at("2026-12-02")
    assert state().watermark == at("2026-12-02")
    (report,) = finalise(at("2026-12-02"))
    assert sum(line.consumed_quantity for line in report.lines.all()) == 12


def test_an_open_period_says_that_it_waits_for_a_clock() -> None:
    spend(account(), "2026-11-15", 7)
    seal_at(at("2026-11-28"))
    drain_at("2026-11-28")
    seal_at(JUNE)
    drain_at("2026-12-02")
    (found,) = open_periods(at("2026-12-02"))
    assert "its server's clock is 15,638,400 seconds ahead of the worker's" in found.why


def refuse(*_statement: object) -> None:
    raise OperationalError("the database does not answer")


def expire(client: Any, key: str) -> None:
    """Let the server expire a key by its clock, as it does after a jump."""
    assert client.pexpire(key, 1)
    while client.exists(key):
        pass


def test_a_clock_that_jumps_ahead_for_a_moment_is_declared_by_the_next_seal(redis_client: RawRedis) -> None:
    """Let the key `clock` expire early, as a server does whose clock is a day ahead for some seconds."""
    seal()
    seal()
    drain()
    assert declared() == []
    key, meta = (f"rl:1:test:{{{home_shard('acme'):02d}}}:{name}" for name in ("clock", "meta"))
    before = int(redis_client.hget(meta, "sealed_at"))
    expire(redis_client, key)
    with connection.execute_wrapper(refuse):
        seal()
    assert declared() == []
    seal()
    ((since, until),) = declared()
    assert (since, before < until <= int(redis_client.hget(meta, "sealed_at"))) == (before, True)
    seal()
    assert declared() == [(since, until)]
    # If nobody sealed for a long time, the key has expired as it should.
    expire(redis_client, key)
    redis_client.hset(meta, "sealed_clock", int(redis_client.hget(meta, "sealed_clock")) - 400 * 10**6)
    seal()
    assert declared() == [(since, until)]


def test_an_evicted_key_is_no_jump_of_the_clock(
    everysec_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Let the server evict all keys with a time to live after another one has expired."""
    seal()
    keyspace = current_server().keyspace
    clocks = [keyspace.meta(shard).replace("meta", "clock") for shard in range(keyspace.shards)]
    with redis.Redis.from_url(f"{everysec_server.url[:-1]}0") as client:
        assert client.exists(*clocks) == len(clocks)
        client.set("other", "1")
        expire(client, "other")
        client.config_set("maxmemory-policy", "volatile-lru")
        client.config_set("maxmemory", "1")
        assert not client.exists(*clocks)
        client.config_set("maxmemory", "0")
    seal()
    drain()
    assert declared() == []
    assert "Set maxmemory-policy noeviction" in caplog.text
    assert "jumped" not in caplog.text
    caplog.clear()
    seal()
    assert "evicted" not in caplog.text


def test_a_deleted_key_is_no_jump_of_the_clock(redis_client: RawRedis) -> None:
    seal()
    key = current_server().keyspace.meta(home_shard("acme")).replace("meta", "clock")
    assert redis_client.delete(key) == 1
    seal()
    assert declared() == []


def test_usage_that_was_counted_while_the_clock_was_ahead_for_a_moment_is_declared() -> None:
    """Count usage in December in the middle of November, and seal and drain it when the clock is right again."""
    seal_at(at("2026-11-15T11:00"), at("2026-11-15T11:00"))
    drain_at("2026-11-15T11:00")
    use(now=at("2026-11-15T11:30"))
    use(now=at("2026-12-01T11:30"))
    use(now=at("2026-11-15T11:31"))
    seal_at(at("2026-11-15T12:00"), at("2026-11-15T12:00"))
    drain_at("2026-11-15T12:00")
    lead = at("2026-12-01T11:30") - at("2026-11-15T12:00")
    assert declared() == [
        (at("2026-11-15T11:00"), at("2026-11-15T12:00")),
        (at("2026-11-15T11:00") + lead, at("2026-12-01T11:30")),
    ]


def test_a_clock_that_is_ahead_is_warned_of() -> None:
    rule("monthly", bills=True)
    seal()
    drain()
    seal_at(at("2100-01-01"))
    drain()
    found = [each.id for each in checks.run_checks(tags=["ratelimits"], databases=["default"])]
    assert "ratelimits.W033" in found
    assert "ratelimits.W032" not in found
