from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db.models import F
from django.test import override_settings

from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.ledger.retention.compact import CompactResult, compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.verify import ledger
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import Batch, ChainMark, DurabilityGap, GapKind, Line, QuarantinedBatch, ShardState
from tests.support.plain import PLAIN
from tests.support.usage.traffic import flow, use
from tests.usage.ledger.test_gaps import keys, put_back

pytestmark = pytest.mark.django_db(transaction=True)

SIGNED = {**PLAIN, "SIGNING_KEY": "of the finance department"}


@pytest.fixture(autouse=True)
def _long_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that no hour ends while a test runs."""
    monkeypatch.setattr(compacting, "SPAN", 10**17)


def pass_time() -> None:
    """Go on as if the hour were over."""
    ShardState.objects.update(watermark=F("watermark") + 2 * compacting.SPAN)


def three_batches() -> None:
    for cost in (1, 20, 300):
        use(cost=cost)
        use(key=f"api_key:{cost}")
        flow()


def units() -> dict[str, int]:
    return {line.key: line.admitted_units for line in Line.objects.order_by("key")}


def test_the_batches_of_an_hour_become_one_with_a_line_for_each_key_and_bin() -> None:
    three_batches()
    digests = Batch.objects.order_by("position").values_list("content", "digest")
    (first, _), (second, _), (third, head) = list(digests)
    assert list(compact()) == [], "the hour is not over"
    pass_time()
    (done,) = compact()
    assert (done.batches, done.lines_before, done.lines) == (3, 5, 3)
    assert units() == {"api_key:1": 322, "api_key:20": 1, "api_key:300": 1}
    joined = Batch.objects.get()
    assert (joined.first_seq, joined.seq, joined.first_position, joined.position) == (1, 3, 1, 3)
    assert bytes(joined.parts).hex() == first + second + third
    assert joined.digest == head
    assert list(verify_ledger("default")) == []
    assert list(compact()) == []


def test_compacted_batches_are_compacted_again_and_followed_by_new_ones() -> None:
    three_batches()
    pass_time()
    list(compact())
    use()
    flow()
    pass_time()
    assert [done.batches for done in compact()] == [2]
    assert Batch.objects.get().position == 4
    assert list(verify_ledger("default")) == []


def test_batches_are_not_joined_across_the_end_of_a_report() -> None:
    three_batches()
    ChainMark.objects.create(shard=Batch.objects.filter(position=1).get().shard, position=2)
    pass_time()
    assert [done.batches for done in compact()] == [2]
    assert list(Batch.objects.order_by("position").values_list("first_position", "position")) == [(1, 2), (3, 3)]


def test_a_ledger_whose_running_sum_was_changed_in_redis_holds_and_is_not_joined_across_it(
    redis_client: redis.Redis,
) -> None:
    use()
    flow()
    (meta,) = keys(redis_client, f"{{{Batch.objects.get().shard:02d}}}:meta")
    redis_client.hincrby(meta, "cum", 5)
    use()
    flow()
    assert DurabilityGap.objects.get().kind == GapKind.SUM
    assert list(verify_ledger("default")) == []
    pass_time()
    assert list(compact()) == []
    assert list(verify_ledger("default")) == []
    DurabilityGap.objects.all().delete()
    assert ["the running sum was 2 before batch" in finding for finding in verify_ledger("default")] == [True]


@pytest.fixture
def again(redis_client: redis.Redis) -> tuple[bytes, dict[bytes, bytes]]:
    """Return key and fields of the first of four compacted batches, as they were in Redis."""
    use()
    seal()
    (key,) = keys(redis_client, "b:*")
    fields: Any = redis_client.hgetall(key)
    flow()
    three_batches()
    pass_time()
    assert [done.batches for done in compact()] == [4]
    return key, fields


def test_a_batch_that_comes_again_after_it_was_compacted_is_known(
    redis_client: redis.Redis, again: tuple[bytes, dict[bytes, bytes]]
) -> None:
    put_back(redis_client, *again, cum=2, count=1)
    assert drain().outcomes == {BatchOutcome.DONE_BEFORE: 1}
    assert not QuarantinedBatch.objects.exists()


def test_a_fork_of_a_compacted_batch_is_quarantined(
    redis_client: redis.Redis, again: tuple[bytes, dict[bytes, bytes]]
) -> None:
    put_back(redis_client, *again, cum=4, count=2)
    assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}


def test_a_compacted_line_that_is_changed_is_found_and_with_a_key_also_a_rebuilt_batch() -> None:
    with override_settings(RATELIMITS=SIGNED):
        three_batches()
        pass_time()
        (done,) = compact()
        assert isinstance(done, CompactResult)
        assert list(verify_ledger("default")) == []
        Line.objects.filter(admitted_units=322).update(admitted_units=320)
        assert any("was changed after it was written" in finding for finding in verify_ledger("default"))
        Batch.objects.update(content="0" * 64)
        assert any("signature" in finding for finding in verify_ledger("default"))


def test_compacted_batches_go_through_an_archive(tmp_path: Path) -> None:
    three_batches()
    pass_time()
    list(compact())
    batch = Batch.objects.get()
    digest = archive.write(tmp_path / "file", archive.file_lines_of([batch]))
    ((read, lines),) = archive.read(tmp_path / "file", digest)
    assert (bytes(read.parts), read.content, len(lines)) == (bytes(batch.parts), batch.content, batch.line_count)


def test_compaction_while_the_ledger_is_verified_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    three_batches()
    pass_time()
    verify_lines = ledger._verify_lines
    compacted: list[Any] = []

    def compact_first(batch: Batch) -> Iterator[str]:
        compacted.extend(compact())
        return verify_lines(batch)

    monkeypatch.setattr(ledger, "_verify_lines", compact_first)
    assert list(verify_ledger("default")) == []
    assert [done.batches for done in compacted] == [3]


def test_batches_that_were_joined_while_they_were_archived_stay_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_batches()
    pass_time()
    batches = list(Batch.objects.order_by("position"))
    read = archive.read

    def compact_first(path: Path, recorded: str) -> Iterator[tuple[Batch, list[bytes]]]:
        list(compact())
        return read(path, recorded)

    monkeypatch.setattr(archive, "read", compact_first)
    with pytest.raises(archive.ArchiveError, match="prune again"):
        archive._prune_shard("default", batches[0].shard, batches, tmp_path)
    assert units() == {"api_key:1": 322, "api_key:20": 1, "api_key:300": 1}
    assert list(verify_ledger("default")) == []
    assert archive.files(tmp_path) == []
