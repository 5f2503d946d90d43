from __future__ import annotations

from pathlib import Path

import pytest
import redis
from django.db.models import F

from ratelimits.usage.ledger import resolve
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import Batch, Line, QuarantinedBatch, ShardState
from tests.support.usage.quarantine import Fork
from tests.support.usage.traffic import flow, use
from tests.usage.ledger.test_gaps import keys, state, units

pytestmark = pytest.mark.django_db(transaction=True)


def holds() -> bool:
    return list(verify_ledger("default")) == []


def test_what_is_discarded_leaves_the_ledger_as_it_is_and_lets_the_watermark_go_on(fork: Fork) -> None:
    kept = fork(5)
    before = state().watermark
    resolution = resolve.discard("default", kept.pk, "ada")
    assert resolution == "discarded by ada"
    kept.refresh_from_db()
    assert (kept.resolution, kept.resolved_at is not None) == (resolution, True)
    flow()
    assert (units(), state().frozen) == (3, False)
    assert state().watermark > before
    assert holds()


def test_of_what_is_accepted_only_what_the_ledger_lacks_is_added(fork: Fork) -> None:
    kept = fork(5)
    resolution = resolve.accept("default", kept.pk, "ada")
    assert resolution == "accepted by ada: 1 lines, 4 requests and units"
    assert (units(), state().frozen) == (5, False)
    added = Batch.objects.get(fence="person")
    assert (added.incarnation, added.follows) == (f"quarantine-{kept.pk}", kept.name)
    assert holds()
    use()
    flow()
    assert units() == 6
    assert holds(), "the shard's chain goes on behind it"


def test_a_second_fork_adds_only_what_neither_the_batch_nor_the_first_one_had(fork: Fork) -> None:
    first, second = fork(5), fork(7)
    resolve.accept("default", first.pk, "ada")
    assert state().frozen, "the second one is still in quarantine"
    resolve.accept("default", second.pk, "ada")
    assert (units(), state().frozen) == (7, False)
    assert holds()


def test_the_same_again_adds_nothing(fork: Fork) -> None:
    first, second = fork(7), fork(5)
    resolve.accept("default", first.pk, "ada")
    assert resolve.accept("default", second.pk, "ada") == "accepted by ada: 0 lines, 0 requests and units"
    assert units() == 7


def test_what_was_resolved_freezes_nothing_when_it_comes_again(fork: Fork) -> None:
    resolve.discard("default", fork(5).pk, "ada")
    assert fork(5).resolved_at is not None
    assert not state().frozen


def test_what_was_resolved_is_not_resolved_again(fork: Fork) -> None:
    kept = fork(5)
    resolve.discard("default", kept.pk, "ada")
    for way in (resolve.accept, resolve.discard):
        with pytest.raises(resolve.UnresolvableError, match="resolved already: discarded by ada"):
            way("default", kept.pk, "eve")
    assert units() == 3


def test_a_batch_that_the_ledger_never_had_is_added_whole(fork: Fork) -> None:
    kept = fork(5)
    Batch.objects.get().lines().delete()
    Batch.objects.all().delete()
    resolve.accept("default", kept.pk, "ada")
    assert units() == 5


def test_a_fork_of_a_joined_batch_is_not_guessed_at(fork: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compacting, "SPAN", 10**17)
    use(key="api_key:2")
    flow()
    ShardState.objects.update(watermark=F("watermark") + 2 * compacting.SPAN)
    assert [done.batches for done in compact()] == [2]
    kept = fork(5)
    with pytest.raises(resolve.UnresolvableError, match="joined with other batches"):
        resolve.accept("default", kept.pk, "ada")
    assert state().frozen
    resolve.discard("default", kept.pk, "ada")
    assert (units(), state().frozen) == (4, False)


def test_a_fork_of_an_archived_batch_waits_until_that_is_restored(fork: Fork, tmp_path: Path) -> None:
    tally()
    pruned = archive._prune_shard("default", state().shard, list(Batch.objects.all()), tmp_path)
    kept = fork(5)
    with pytest.raises(resolve.UnresolvableError, match=pruned.path.name):
        resolve.accept("default", kept.pk, "ada")
    archive.restore("default", pruned.path)
    resolve.accept("default", kept.pk, "ada")
    assert units() == 5


def test_a_batch_that_a_newer_version_can_read_is_compared_with_the_ledger(redis_client: redis.Redis) -> None:
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    fields = {name.decode(): value.decode() for name, value in redis_client.hgetall(key).items()}  # type: ignore[union-attr]
    drain()
    batch = Batch.objects.get()
    kept = QuarantinedBatch.objects.create(
        shard=batch.shard, name=f"{batch.incarnation}:{batch.seq}~nonce", reason="an unknown field", fields=fields
    )
    assert resolve.accept("default", kept.pk, "ada") == "accepted by ada: 0 lines, 0 requests and units"
    assert units() == 1


def test_what_could_not_be_read_can_only_be_discarded(redis_client: redis.Redis) -> None:
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    redis_client.hset(key, "a|0|0|m|0|0|a|k|x", "0")
    drain()
    kept = QuarantinedBatch.objects.get()
    with pytest.raises(resolve.UnresolvableError, match="make an adjustment from its fields"):
        resolve.accept("default", kept.pk, "ada")
    resolve.discard("default", kept.pk, "ada")
    flow()
    assert not ShardState.objects.filter(frozen=True).exists()
    assert not Line.objects.exists()
