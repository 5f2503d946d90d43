from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db import connections
from django.test.utils import CaptureQueriesContext

from ratelimits.billing.reports.gaps import Gaps, describe
from ratelimits.conf import conf
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import current_server
from ratelimits.models.accounts.named import named_now
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.usage import tasks
from ratelimits.usage.ledger import crash, resolve
from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.pending import BATCHES_PER_PASS
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import Batch, DurabilityGap, Line, QuarantinedBatch, ShardState
from tests.support.entry_points import away
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db(transaction=True)


def flow() -> None:
    seal()
    drain()


def keys(client: RawRedis, what: str) -> list[bytes]:
    return sorted(client.keys(f"rl:1:test*:{what}"))


def kinds() -> list[str]:
    return list(DurabilityGap.objects.order_by("declared_at", "pk").values_list("kind", flat=True))


def units() -> int:
    return sum(Line.objects.values_list("admitted_units", flat=True))


def state() -> ShardState:
    """Return the state of the only shard in use."""
    return ShardState.objects.get(position__gt=0)


def test_a_restart_is_declared_once_with_the_fsync_policy(always_server: EmbeddedServer) -> None:
    use()
    flow()
    use()
    always_server.kill()
    always_server.start()
    use(cost=5)
    for _ in range(2):
        flow()
    assert units() == 7
    gap = DurabilityGap.objects.get()
    assert (gap.kind, gap.shard, gap.shards) == ("restart", None, "")
    assert (gap.fsync, gap.detail) == ("always", "appendfsync always: no acknowledged usage can be missing")
    assert gap.harmless
    first, second, third = Batch.objects.order_by("position")
    assert (second.incarnation, second.seq) == (first.incarnation, 2)
    assert (third.follows, third.seq) == (f"{first.incarnation}:2", 1)


def test_one_drain_declares_a_restart_also_in_a_shard_where_only_earlier_usage_waits(
    always_server: EmbeddedServer,
) -> None:
    use()
    flow()
    use()
    seal()
    always_server.kill()
    always_server.start()
    flow()
    assert kinds() == ["restart"]


@pytest.mark.parametrize("policy", ["everysec", "always"])
def test_a_clean_restart_is_one_gap_in_words_or_a_note(
    policy: str, settings: Any, tmp_path: Path, servers: TestServers
) -> None:
    """The server gets SIGTERM. Whether it wrote all before its end, only `always` proves."""
    binary = server_binary(servers.redis_kind)
    server = EmbeddedServer(tmp_path / "restarted", aof=True, binary=binary, options={"appendfsync": policy})
    away(settings, server.port)
    try:
        rule(bills=True)
        use()
        tasks.seal()
        tasks.drain()
        ran = time.time()
        server.stop()
        server.start()
        use()
        tasks.seal()
        tasks.drain()
        tasks.drain()
    finally:
        server.stop()
    gap = DurabilityGap.objects.get()
    assert (gap.kind, gap.fsync, gap.harmless) == ("restart", policy, policy == "always")
    product = {"valkey": "Valkey"}.get(servers.redis_kind, "Redis")
    span = r"\d\d:\d\d:\d\d–\d\d:\d\d:\d\d UTC on \d{4}-\d\d-\d\d"
    assert re.fullmatch(rf"{product} restarted {span}", str(gap))
    assert gap.answered is not None
    assert abs(gap.answered / 1e6 - ran) < 60
    assert gap.since <= gap.answered <= gap.until
    [fact] = [fact for fact in facts() if fact.name == "gaps"]
    assert str(gap) in fact.detail
    assert (fact.level is Level.GREEN) == (policy == "always")
    printed = Gaps.between("default", gap.since - 1, gap.until + 1).text(
        [0], named_now("default", ["acme"])["acme"], gap.since, gap.until + 1
    )
    assert printed.startswith("restart ") == (policy == "everysec")


def test_a_restart_in_the_middle_of_a_drain_is_declared(
    always_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use()
    flow()
    for _number in range(BATCHES_PER_PASS + 1):
        use()
        seal()
    dropped = 0

    def reached(point: str) -> None:
        nonlocal dropped
        dropped += point == "drain:dropped"
        if point == "drain:dropped" and dropped == BATCHES_PER_PASS:
            always_server.kill()
            always_server.start()

    monkeypatch.setattr(crash, "reached", reached)
    drain()
    assert units() == BATCHES_PER_PASS + 2
    assert kinds() == ["restart"]


def test_all_shards_of_a_wiped_server_are_locked_at_once(redis_client: RawRedis) -> None:
    for number in range(40):
        use(f"account{number}")
    flow()
    filled = ShardState.objects.exclude(incarnation="").count()
    assert filled > 4
    redis_client.flushall()
    seal()
    with CaptureQueriesContext(connections[conf.DATABASE]) as asked:
        drain()
    assert kinds() == ["wipe"] * filled
    statements = [query["sql"] for query in asked]
    locks = [number for number, sql in enumerate(statements) if "FOR UPDATE" in sql or 'SET "position" =' in sql]
    declared = [
        number for number, sql in enumerate(statements) if sql.startswith('INSERT INTO "ratelimits_usage_durabilityg')
    ]
    assert len([number for number in locks if number < declared[-1]]) == 1
    assert len([number for number in locks if number > declared[-1]]) == 1, "to advance the watermarks of all shards"


def test_a_wipe_is_declared_with_new_usage_and_without(redis_client: RawRedis) -> None:
    use()
    flow()
    redis_client.flushall()
    flow()
    assert kinds() == ["wipe"] * conf.SHARDS, "usage that was not drained may have been in any shard"
    use()
    flow()
    assert kinds() == ["wipe"] * conf.SHARDS
    redis_client.flushall()
    use()
    flow()
    assert kinds() == ["wipe"] * (2 * conf.SHARDS)
    assert all("user default" in gap.detail for gap in DurabilityGap.objects.all()), "a restart can do this too"
    assert units() == 3


@pytest.mark.parametrize("more", [True, False], ids=["with usage after it", "without"])
def test_a_wipe_of_usage_that_was_never_drained_is_declared(redis_client: RawRedis, more: bool) -> None:
    flow()
    for count in (conf.SHARDS, 2 * conf.SHARDS):
        use(cost=40)
        redis_client.flushall()
        if more:
            use(account="other")
        seal()
        for _again in range(2):
            drain()
        assert kinds() == ["wipe"] * count


@pytest.mark.parametrize("kept", [0, 1], ids=["first batch", "later batch"])
@pytest.mark.parametrize("what", ["open", "sealed"])
def test_a_batch_that_was_lost_is_missing_also_if_no_usage_comes_after_it(
    redis_client: RawRedis, what: str, kept: int
) -> None:
    for _ in range(kept):
        use()
        flow()
    use(cost=40)
    if what == "sealed":
        seal()
    redis_client.delete(*keys(redis_client, what))
    for _again in range(2):
        flow()
        gap = DurabilityGap.objects.get()
        assert (gap.kind, gap.first_seq, gap.last_seq) == ("missing", 1 + kept, 1 + kept)
    use()
    flow()
    gap = DurabilityGap.objects.get()
    assert (gap.requests, gap.units) == ((1, 40) if what == "sealed" else (None, None))
    assert units() == 1 + kept
    assert list(verify_ledger("default")) == []


def test_an_open_batch_that_was_lost_is_missing_by_its_number(redis_client: RawRedis) -> None:
    use()
    flow()
    use(cost=40)
    redis_client.delete(*keys(redis_client, "open"))
    use()
    flow()
    gap = DurabilityGap.objects.get()
    assert (gap.kind, gap.first_seq, gap.last_seq) == ("missing", 2, 2)
    assert units() == 2


def test_a_sealed_batch_that_was_lost_is_missing_with_what_was_in_it(redis_client: RawRedis) -> None:
    use()
    flow()
    use(cost=40)
    seal()
    redis_client.delete(*keys(redis_client, "b:*"))
    flow()
    use()
    flow()
    gap = DurabilityGap.objects.get()
    # One request of 40 units. Each number has one unit.
    assert (gap.kind, gap.first_seq, gap.last_seq, gap.requests, gap.units) == ("missing", 2, 2, 1, 40)
    assert describe(gap).endswith(" missing-requests=1 missing-units=40")


def test_what_is_missing_is_what_the_lost_batches_had_in_requests_and_in_units(redis_client: RawRedis) -> None:
    """Lose some of many batches; the gaps have the numbers that a model reads from the batches before they are lost."""
    dice, lost = random.Random(5), [0, 0]
    for turn in range(30):
        for _request in range(dice.randrange(1, 4)):
            use(
                cost=dice.choice([1, 1, 2, 40, 999_999]), capacity=dice.choice([None, 1]), meter=dice.choice(["a", "b"])
            )
        seal()
        if turn % 10 not in (0, 9) and dice.random() < 0.5:
            (key,) = keys(redis_client, "b:*")
            for name, value in redis_client.hgetall(key).items():
                if not name.startswith(b"#"):
                    lost[0] += int(value) * (name[-1:] in (b"1", b"n"))
                    lost[1] += int(value) * (name[-1:] in (b"1", b"u"))
            redis_client.delete(key)
            if dice.random() < 0.5:
                continue  # the next drain finds several batches missing
        drain()
        if turn == 20:
            tally()
            ShardState.objects.update(watermark=2**52)
            list(compact())
    use()
    flow()
    gaps = DurabilityGap.objects.filter(kind="missing")
    assert gaps.count() > 3
    assert [sum(n or 0 for n in gaps.values_list(name, flat=True)) for name in ("requests", "units")] == lost
    assert list(verify_ledger("default")) == []


def test_a_batch_that_comes_after_it_was_declared_missing_is_taken_and_the_gap_says_so(
    redis_client: RawRedis,
) -> None:
    use()
    flow()
    use(cost=40)
    seal()
    (key,) = keys(redis_client, "b:*")
    kept = redis_client.dump(key)
    assert isinstance(kept, bytes)
    redis_client.delete(key)
    flow()
    redis_client.restore(key, 0, kept)
    shard, name = key.decode().split("{")[1].split("}:b:")
    redis_client.rpush(f"rl:1:test:{{{shard}}}:sealed", name)
    flow()
    assert units() == 41
    assert DurabilityGap.objects.get().recovered_at is not None


def test_a_gap_of_several_batches_is_recovered_once_all_of_them_came(redis_client: RawRedis) -> None:
    use()
    flow()
    for cost in (40, 50, 60):
        use(cost=cost)
        seal()
    (sealed,) = keys(redis_client, "sealed")
    names = redis_client.lrange(sealed, 0, -1)
    kept = {key: redis_client.hgetall(key) for key in keys(redis_client, "b:*")}
    redis_client.delete(sealed, *kept)
    use()
    flow()
    assert DurabilityGap.objects.get().last_seq == 4
    for count, (key, fields) in enumerate(kept.items(), 1):
        redis_client.hset(key, mapping=fields)
        redis_client.rpush(sealed, next(name for name in names if key.endswith(name)))
        flow()
        assert (DurabilityGap.objects.get().recovered_at is not None) == (count == 3)
    assert units() == 152


def test_a_batch_that_a_person_discarded_is_not_billed_when_it_comes_again(redis_client: RawRedis) -> None:
    use()
    flow()
    use(cost=40)
    seal()
    (key,) = keys(redis_client, "b:*")
    fields = redis_client.hgetall(key)
    redis_client.hset(key, "#c", "1")
    flow()
    use()
    flow()
    resolve.discard("default", QuarantinedBatch.objects.get().pk, "ada")
    redis_client.hset(key, mapping=fields)
    place, name = key.decode().split(":b:")
    redis_client.rpush(f"{place}:sealed", name)
    flow()
    assert units() == 2
    again = QuarantinedBatch.objects.get(resolved_at=None)
    assert state().frozen
    resolve.accept("default", again.pk, "ada")
    assert units() == 42


def test_a_ledger_holds_whose_missing_batch_came_after_newer_ones(redis_client: RawRedis) -> None:
    use()
    flow()
    use(cost=40)
    seal()
    (key,) = keys(redis_client, "b:*")
    kept = redis_client.dump(key)
    assert isinstance(kept, bytes)
    redis_client.delete(key)
    flow()
    use(cost=300)
    flow()
    redis_client.restore(key, 0, kept)
    shard, name = key.decode().split("{")[1].split("}:b:")
    redis_client.rpush(f"rl:1:test:{{{shard}}}:sealed", name)
    flow()
    use(cost=2000)
    flow()
    assert units() == 2341
    assert list(Batch.objects.order_by("position").values_list("seq", flat=True)) == [1, 3, 2, 4]
    assert list(verify_ledger("default")) == []


def put_back(client: RawRedis, key: bytes, fields: dict[bytes, bytes], **changed: int) -> None:
    """Put a batch back into Redis, as if its data had gone back to an older state."""
    counter = next(name for name in fields if not name.startswith(b"#"))
    changes = {b"#c": changed["cum"], counter: changed["count"]}
    client.hset(key, mapping={**fields, **{name: str(value).encode() for name, value in changes.items()}})
    place, name = key.decode().split(":b:")
    client.rpush(f"{place}:sealed", name)


@pytest.fixture
def drained(redis_client: RawRedis) -> tuple[bytes, dict[bytes, bytes]]:
    """Drain a batch of three requests; return its key and fields as they were in Redis."""
    for _ in range(3):
        use()
    seal()
    (key,) = keys(redis_client, "b:*")
    fields = redis_client.hgetall(key)
    drain()
    return key, fields


def test_the_same_batch_again_is_skipped(redis_client: RawRedis, drained: tuple[bytes, dict[bytes, bytes]]) -> None:
    put_back(redis_client, *drained, cum=6, count=3)
    assert drain().outcomes == {BatchOutcome.DONE_BEFORE: 1}
    assert units() == 3
    assert kinds() == []
    assert not keys(redis_client, "b:*")


def test_an_older_state_of_a_batch_is_discarded_and_declared(
    redis_client: RawRedis, drained: tuple[bytes, dict[bytes, bytes]]
) -> None:
    put_back(redis_client, *drained, cum=4, count=2)
    assert drain().outcomes == {BatchOutcome.DISCARDED: 1}
    assert units() == 3
    assert kinds() == ["fork"]


def test_a_fork_is_quarantined_and_freezes_the_watermark(
    redis_client: RawRedis, drained: tuple[bytes, dict[bytes, bytes]]
) -> None:
    flow()
    before = state().watermark
    assert before
    put_back(redis_client, *drained, cum=8, count=4)
    assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}
    flow()
    assert units() == 3
    assert state().frozen
    assert state().watermark == before
    use()
    flow()
    assert units() == 4, "usage that comes later is still taken"


def test_a_batch_whose_sum_does_not_hold_is_kept_as_it_came(redis_client: RawRedis) -> None:
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    redis_client.hincrby(key, next(f for f in redis_client.hkeys(key) if not f.startswith(b"#")), 1)
    fields = {name.decode(): value.decode() for name, value in redis_client.hgetall(key).items()}
    assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}
    kept = QuarantinedBatch.objects.get()
    assert json.loads(json.dumps(kept.fields)) == fields
    assert "running sum was 0, the counters add 4, but the sum became 2" in kept.reason
    assert not keys(redis_client, "b:*")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x|0|0|m|0|0|a|k|1", "0"),
        ("a|0|0|m|0|0|a|k|x", "0"),
        ("a|0|0|m|0|a|k|1", "0"),
        ("a|007|0|m|0|0|a|k|1", "0"),
        ("a|0|0|m|0|0|a|k|1", "-1"),
        ("a|0|0|m|0|0|a|k|1", "9" * 5000),
        ("a|0|0|m|0|0|a|k|1|a|0|0|m|0|0|a|k|1", "0"),
        ("a|0|0|m|0|0|a|k|1|\n|a|0|0|m|0|0|a|k|1", "0"),
        ("a", "0"),
        ("a\0", "0"),
        ("#s", "9" * 30),
        ("#i", "i" * 300),
        ("#r", "nul\0"),
        ("#f", "no batch"),
    ],
)
def test_a_field_that_nobody_wrote_like_this_is_not_guessed_at(redis_client: RawRedis, field: str, value: str) -> None:
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    redis_client.hset(key, field, value)
    assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}
    assert state_of(key).frozen


def state_of(key: bytes) -> ShardState:
    return ShardState.objects.get(shard=int(key.decode().split("{")[1].split("}")[0]))


def test_what_is_no_hash_is_quarantined_too(redis_client: RawRedis) -> None:
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    redis_client.set(key, "nonsense")
    assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}
    assert QuarantinedBatch.objects.get().fields["type"] == "string"


def test_names_come_through_whatever_is_in_them() -> None:
    names = ["tab\there", "new\nline", "back\\slash\\t", "pipe|and#hash", "Zoë", "\\N", "100%41", "\N{SNOWMAN}" * 20]
    for name in names:
        use(account=name, key=f"api_key:{name}")
    flow()
    assert set(Line.objects.values_list("account", flat=True)) == set(names)
    assert kinds() == []


def test_a_rollback_of_the_server_is_declared(always_server: EmbeddedServer, redis_client: RawRedis) -> None:
    with redis.Redis.from_url(always_server.url) as client:
        use()
        flow()
        (meta,) = [key for key in keys(client, "meta") if client.hexists(key, "incarnation")]
        old = client.hgetall(meta)
        use()
        flow()
        client.hset(meta, mapping=old)
        flow()
        assert kinds() == ["rollback"]
        assert current_server().keyspace.namespace == "test"


def test_the_watermark_follows_the_last_seal_also_in_shards_without_usage() -> None:
    use()
    at = {each.shard: each.sealed_at for each in seal()}
    drain()
    marks = dict(ShardState.objects.values_list("shard", "watermark"))
    assert marks.keys() == at.keys()
    assert all(min(at.values()) <= marks[shard] <= at[shard] for shard in at)
    assert state().watermark == at[state().shard]
