"""Test files that are not archives of this ledger: none is restored, and none uses unbounded memory."""

from __future__ import annotations

import gzip
import hashlib
import tracemalloc
from pathlib import Path

import pytest

from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import ArchivedRange, Batch, Line, PeriodUsage
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def moved(tmp_path: Path, fsync_at_once: None) -> Path:
    """Make an archive of one batch with 7 units."""
    use(cost=7)
    flow()
    (batch,) = Batch.objects.all()
    archive._prune_shard("default", batch.shard, [batch], tmp_path)
    (path,) = archive.files(tmp_path)
    return path


def forge(path: Path, old: bytes, new: bytes) -> None:
    """Change the content of a file, and give it the right digest of the new content."""
    content = gzip.decompress(path.read_bytes()).rpartition(b"end ")[0]
    assert old in content
    content = content.replace(old, new)
    path.write_bytes(gzip.compress(content + f"end {hashlib.sha256(content).hexdigest()}\n".encode()))


def test_what_was_archived_comes_back(moved: Path) -> None:
    assert not Line.objects.exists()
    assert archive.restore("default", moved) == 1
    assert Line.objects.get().admitted_units == 7


def test_a_forged_file_with_a_digest_of_its_own_is_not_restored(moved: Path) -> None:
    forge(moved, b"\t1\t7\t", b"\t1\t9\t")
    with pytest.raises(archive.ArchiveError, match="its digest differs"):
        archive.restore("default", moved)
    with pytest.raises(archive.ArchiveError, match="its digest differs"), archive.opened("default", [moved]):
        pass
    assert not Line.objects.exists()
    assert ArchivedRange.objects.exists()


def test_a_file_that_the_ledger_does_not_know_is_not_restored(moved: Path) -> None:
    stranger = moved.rename(moved.with_name(f"99-1-1{archive.SUFFIX}"))
    with pytest.raises(archive.ArchiveError, match="has no record of the archive"):
        archive.restore("default", stranger)


@pytest.mark.parametrize("text", [b"0" * 1000, b"0" * 999 + b"\n"])
def test_a_small_file_that_becomes_a_large_one_takes_little_memory(moved: Path, text: bytes) -> None:
    with gzip.open(moved, "wb") as out:
        out.write(b"ratelimits archive 3\n")
        for _ in range(100):
            out.write(text * 1000)
    assert moved.stat().st_size < 1_000_000
    tracemalloc.start()
    with pytest.raises(archive.ArchiveError, match=r"too long|too early"):
        archive.restore("default", moved)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


def test_usage_that_is_not_in_the_totals_yet_is_not_archived(tmp_path: Path, fsync_at_once: None) -> None:
    for day in ("2026-01-15", "2026-03-15"):
        use(now=at(day))
        seal()
        drain(at("2100-01-01"))
    before = at("2026-02-01") // 10**6
    assert list(archive.prune("default", before, tmp_path)) == []
    tally()
    assert PeriodUsage.objects.count() == 2
    with pytest.raises(archive.ArchiveError, match="finalise it first"):
        list(archive.prune("default", before, tmp_path))


def test_without_bills_usage_is_archived_by_its_age(tmp_path: Path, fsync_at_once: None, no_bills: None) -> None:
    for day in ("2026-01-15", "2026-03-15"):
        use(now=at(day))
        seal()
        drain(at("2100-01-01"))
    tally()
    (pruned,) = archive.prune("default", at("2026-02-01") // 10**6, tmp_path)
    assert pruned.batches == 1
    assert Line.objects.count() == 1
    assert archive.restore("default", pruned.path) == 1
    assert Line.objects.count() == 2


def test_a_batch_goes_when_every_period_of_its_lines_has_a_report(tmp_path: Path, fsync_at_once: None) -> None:
    """Use an account whose second period ends only after the month that is archived."""
    account(billing_anchor="2026-01-10T00:00")
    before = at("2026-02-01") // 10**6
    for day in ("2026-01-05", "2026-01-20"):
        spend("acme", day)
        flow()
    with pytest.raises(archive.ArchiveError, match="finalise it first"):
        list(archive.prune("default", before, tmp_path))
    close("2026-02-01")
    (pruned,) = archive.prune("default", before, tmp_path)
    assert (pruned.batches, Line.objects.get().bin) == (1, at("2026-01-20") // 10**6)
    assert list(archive.prune("default", before, tmp_path)) == []
    close("2026-02-12")
    (pruned,) = archive.prune("default", before, tmp_path)
    assert (pruned.batches, Line.objects.exists()) == (1, False)
