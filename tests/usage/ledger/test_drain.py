from __future__ import annotations

import threading

import pytest
import redis
from redis.exceptions import ResponseError

from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import current_server
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Batch, Line, QuarantinedBatch, ShardState
from tests.support.eventually import until
from tests.support.raw import RawRedis
from tests.support.usage.traffic import NOON, flow, use

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_was_decided_becomes_one_line_for_each_rule_it_names() -> None:
    for _ in range(3):
        use(cost=1)
    use(cost=250)
    for _ in range(4):
        use(key="api_key:2", capacity=2, rule=7, version=9)
    flow()
    rows = Line.objects.order_by("key").values(
        "account", "key", "meter", "rule", "version", "bin",
        "admitted_requests", "admitted_units", "denied_requests", "denied_units",
    )  # fmt: skip
    where = {"account": "acme", "meter": "requests", "bin": NOON // 10**6}
    assert list(rows) == [
        {**where, "key": "api_key:1", "rule": 1, "version": 1,
         "admitted_requests": 4, "admitted_units": 253, "denied_requests": 0, "denied_units": 0},
        {**where, "key": "api_key:2", "rule": 7, "version": 9,
         "admitted_requests": 2, "admitted_units": 2, "denied_requests": 2, "denied_units": 2},
    ]  # fmt: skip


def test_draining_again_changes_nothing() -> None:
    use()
    flow()
    before = list(Line.objects.values()), list(Batch.objects.values())
    flow()
    assert (list(Line.objects.values()), list(Batch.objects.values())) == before


def test_a_batch_of_a_new_run_says_which_batch_it_follows(redis_client: RawRedis) -> None:
    use()
    flow()
    (meta,) = (key for key in redis_client.keys("*:meta") if redis_client.hexists(key, "seq"))
    redis_client.hset(meta, "run", "earlier")
    use()
    flow()
    first, second = Batch.objects.order_by("position")
    assert first.incarnation != second.incarnation
    assert (first.follows, second.follows) == ("", f"{first.incarnation}:1")


def waits_for_fsync() -> bool:
    """Drain, and return whether the drain has waited for an fsync. It then writes the fence's key."""
    client, key = current_server().wire.client, current_server().keyspace.fence(0)
    client.delete(key)
    drain()
    return bool(client.exists(key))


def watermarks() -> set[int]:
    return set(ShardState.objects.values_list("watermark", flat=True))


def test_a_drain_waits_for_an_fsync_only_if_it_writes_something() -> None:
    use()
    assert not waits_for_fsync(), "nothing is sealed"
    seal()
    assert waits_for_fsync()
    before = watermarks()
    assert not waits_for_fsync()
    assert watermarks() == before
    seal()
    assert waits_for_fsync(), "no batch waits, but the watermarks move"
    assert min(watermarks()) > max(before)
    assert not waits_for_fsync()


def test_a_drain_without_batches_still_reports_a_server_that_may_lose_usage(always_server: EmbeddedServer) -> None:
    seal()
    drain()
    with redis.Redis.from_url(always_server.url) as client:
        client.config_set("appendonly", "no")
    with pytest.raises(NotFencedError, match="set appendonly yes"):
        drain()


def test_a_server_that_is_busy_with_a_script_meanwhile_has_nothing_put_aside(
    redis_client: RawRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    seal()
    before = redis_client.config_get("lua-time-limit")
    redis_client.config_set("lua-time-limit", 1)

    def run() -> None:
        with pytest.raises(ResponseError, match="killed"):
            redis_client.eval("while true do end", 0)

    def busy() -> bool:
        try:
            return not redis_client.ping()
        except ResponseError as error:
            return str(error).startswith("BUSY")

    script = threading.Thread(target=run)

    def reached(point: str) -> None:
        if point == "drain:fenced":
            script.start()
            until(busy, "the server is busy")

    monkeypatch.setattr(crash, "reached", reached)
    try:
        with pytest.raises(ResponseError, match="BUSY"):
            drain()
    finally:
        redis_client.script_kill()
        script.join()
        redis_client.config_set("lua-time-limit", before["lua-time-limit"])
    monkeypatch.undo()
    assert not QuarantinedBatch.objects.exists()
    assert not Line.objects.exists()
    drain()
    assert Line.objects.count() == 1
