"""Archives: move old batches from the ledger to compressed files, and restore them.

Each call of `prune` writes one file for each shard. A file is compressed text. It has a header line. Then, for each
batch, it has the batch's row as JSON and the batch's lines. The last line is the digest of all earlier lines. A file is
written, fsynced and read again before any batch is deleted from the ledger.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from django.db import connections, transaction
from django.db.models import F, Min, Q, QuerySet

from ratelimits import moments
from ratelimits.progress import Progress
from ratelimits.usage.ledger.apply import write_lines
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.ledger.packet import canonical
from ratelimits.usage.models.gaps import ProcessTotal
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT, ArchivedRange, Batch, Line, ShardState
from ratelimits.usage.models.totals import PeriodUsage

#: The first line of each file, with the version of the file format.
HEADER = b"ratelimits archive 3"
#: The end of each file's name.
SUFFIX = ".ratelimits.gz"
#: The columns of a batch that a file contains.
_FIELDS = [field.attname for field in Batch._meta.concrete_fields if field.attname != "id"]
#: Those of them that are bytes.
_BYTES = ("parts", "part_salts")
#: How many lines are read from the database at once.
_LINES_PER_READ = 2000
#: How many accounts one query names.
_ACCOUNTS_PER_QUERY = 1000
#: Time of day in UTC (s) at which a new date begins in the easternmost time zone.
_DATE_START = 10 * 3600
#: Maximum length of a line in a file, in bytes. The row of a batch that was joined from many batches is the longest.
_MAX_LINE = 1 << 22


class ArchiveError(ValueError):
    """Raised if an archive cannot be written or read; the message says why."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    """How many batches and lines of one shard were moved to an archive file."""

    shard: int
    path: Path
    batches: int
    lines: int


def prune(using: str, before: int, directory: Path, progress: Progress | None = None) -> Iterator[PruneResult]:
    """Move the oldest batches of each shard to a file: all batches before the first batch with usage that must stay.

    Usage from the moment `before` (s since 1970 UTC) on must stay, and usage of a billing period that is not on a
    report. Batches that are not tallied yet stay in the ledger too.

    Also delete the process totals of days from which the ledger has no line any more. These totals are not needed any
    more: they were compared with the ledger when the reports were finalised. `progress` shows how many shards are
    done. Raise ArchiveError if usage of a period that ended before `before` is not in a finalised report. If a call was
    interrupted at any point, call again.
    """
    ended = PeriodUsage.objects.using(using).filter(period_end__lte=before)
    _require_finalised(ended)
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(ShardState.objects.using(using).order_by("shard").values_list("shard", flat=True))
    for shard in (progress or Progress()).counted("shards", shards, len(shards)):
        batches = Batch.objects.using(using).filter(shard=shard).order_by("position")
        tallied = ShardState.objects.using(using).get(shard=shard).tallied
        old = batches.filter(position__lte=tallied)
        # Check again: perhaps late usage was tallied while earlier shards were written.
        _require_finalised(ended.filter(shard=shard))
        first_to_stay = _first_to_stay(using, shard, before)
        if first_to_stay is not None:
            old = old.filter(position__lt=first_to_stay)
        if old.exists():
            yield _prune_shard(using, shard, list(old), directory)
    oldest_bin = Line.objects.using(using).filter(bin__lt=before).aggregate(first=Min("bin"))["first"]
    totals_end = before if oldest_bin is None else day_of(oldest_bin)
    ProcessTotal.objects.using(using).filter(kind="admitted", bin__lt=totals_end)._raw_delete(using)


def _first_to_stay(using: str, shard: int, before: int) -> int | None:
    """Return the position of the first batch of a shard with usage that must stay; None if there is none."""
    lines = Line.objects.using(using).filter(batch__shard=shard)
    accounts: dict[tuple[int, int], set[str]] = {}
    usage = _not_finalised(PeriodUsage.objects.using(using).filter(shard=shard, period__lt=before))
    for start, end, account in usage.order_by().values_list("period", "period_end", "account").distinct():
        accounts.setdefault((start, end), set()).add(account)
    conditions = [Q(bin__gte=before)]
    for (start, end), names in accounts.items():
        in_order = sorted(names)
        conditions += [
            Q(bin__gte=start, bin__lt=end, account__in=in_order[first : first + _ACCOUNTS_PER_QUERY])
            for first in range(0, len(in_order), _ACCOUNTS_PER_QUERY)
        ]
    firsts = (lines.filter(one).aggregate(first=Min("batch__first_position"))["first"] for one in conditions)
    return min((first for first in firsts if first is not None), default=None)


def _not_finalised(usage: QuerySet[PeriodUsage]) -> QuerySet[PeriodUsage]:
    """Return the usage that is not in a finalised report.

    `position` is the position of the last batch with this usage. Reports cover the usage up to position `covered`.
    Without the floor of bills there are no reports, so no usage waits for one.
    """
    if bills.included is None:
        return usage.none()
    return usage.filter(Q(covered=None) | Q(position__gt=F("covered")))


def _require_finalised(usage: QuerySet[PeriodUsage]) -> None:
    """Raise ArchiveError if some usage is not in a finalised report."""
    still_open = _not_finalised(usage).order_by("period").first()
    if still_open is not None:
        raise ArchiveError(f"the usage {still_open} is not in a finalised report yet: finalise it first")


def day_of(seconds: int) -> int:
    """Return the start of the day that contains a moment. Both are in seconds since 1970 UTC.

    Here a day begins at 10:00 UTC, when a date begins in the easternmost time zone. The months by which usage is
    archived begin at the same hour. Process totals are deleted by whole days, once the ledger has no line of a day.
    """
    return (seconds - _DATE_START) // 86_400 * 86_400 + _DATE_START


def _prune_shard(using: str, shard: int, batches: list[Batch], directory: Path) -> PruneResult:
    """Write the batches to a file, read the file again, and delete the batches from the ledger."""
    name = f"{shard:02d}-{batches[0].first_position}-{batches[-1].position}{SUFFIX}"
    path = directory / name
    digest = write(path, file_lines_of(batches))
    for _batch, _lines in read(path, digest):
        pass  # If the file cannot be read, this raises an error, and no batch is deleted.
    lines = 0
    with transaction.atomic(using=using, durable=True):
        ShardState.lock(using, shard)
        rows = Batch.objects.using(using).filter(shard=shard, position__lte=batches[-1].position).order_by("position")
        # An erasure gives a batch another salt.
        if list(rows.values_list("pk", "salt")) != [(batch.pk, batch.salt) for batch in batches]:
            path.unlink()
            raise ArchiveError(
                f"batches of shard {shard:02d} were joined, or names in them were erased, while the archive was"
                " written: prune again"
            )
        for incarnation, group in groupby(batches, key=lambda batch: batch.incarnation):
            range_batches = list(group)
            ArchivedRange.objects.using(using).create(
                archive=name,
                shard=shard,
                incarnation=incarnation,
                # Positions follow the order of arrival. A batch that came late has a smaller number than the batch at
                # the position before it.
                first_seq=min(batch.first_seq for batch in range_batches),
                last_seq=max(batch.seq for batch in range_batches),
                first_position=range_batches[0].first_position,
                last_position=range_batches[-1].position,
                previous_digest=range_batches[0].previous_digest,
                digest=range_batches[-1].digest,
                file_digest=digest,
            )
        for batch in batches:
            lines += batch.lines().order_by()._raw_delete(using)
        Batch.objects.using(using).filter(shard=shard, position__lte=batches[-1].position)._raw_delete(using)
    return PruneResult(shard, path, len(batches), lines)


def write(path: Path, file_lines: Iterable[bytes]) -> str:
    """Write the file, and return the digest in its last line. After an error there is no incomplete file at `path`.

    `file_lines` are its lines without their line feeds. The last line, which has the digest, is added.
    """
    digest = hashlib.sha256()
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as raw:
        # The gzip header has no name and no time, so that the same batches always give the same file.
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as out:
            for text in file_lines:
                data = text + b"\n"
                digest.update(data)
                out.write(data)
            out.write(f"end {digest.hexdigest()}\n".encode())
        raw.flush()
        os.fsync(raw.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return digest.hexdigest()


def file_lines_of(batches: list[Batch]) -> Iterator[bytes]:
    """Yield the lines of a file with these batches of the ledger. Leave out the last line, which has the digest."""
    yield HEADER
    for batch in batches:
        yield batch_row(batch)
        for row in batch.lines().values_list(*SUBJECT, *COUNTERS).iterator(_LINES_PER_READ):
            yield canonical(row)


def batch_row(batch: Batch) -> bytes:
    """Return the line of a file with the row of a batch. The lines of the batch follow it."""
    values = {name: getattr(batch, name) for name in _FIELDS}
    values |= {name: bytes(values[name]).hex() for name in _BYTES}
    values |= {"applied_at": batch.applied_at.isoformat()}
    return json.dumps(values, sort_keys=True).encode()


def read(path: Path, recorded: str) -> Iterator[tuple[Batch, list[bytes]]]:
    """Yield the batches of a file as unsaved rows, each with its lines.

    Raise ArchiveError if the file is not complete, or if its digest is not `recorded` (the digest that the ledger has
    for this file). These errors are found only at the end of the file. So a caller must save the batches in a
    transaction.
    """
    with _archive_errors(path), gzip.open(path, "rb") as source:
        file_lines = _read_file_lines(path, source, recorded)
        if next(file_lines) != HEADER:
            raise ArchiveError(f"{path} is not an archive of a ledger")
        for batch_row in file_lines:
            values: dict[str, Any] = json.loads(batch_row)
            values |= {name: bytes.fromhex(values[name]) for name in _BYTES}
            values["applied_at"] = datetime.fromisoformat(values["applied_at"])
            batch = Batch(**values)
            lines = list(islice(file_lines, batch.line_count))
            if len(lines) != batch.line_count:
                raise ArchiveError(f"{path} ends too early")
            yield batch, lines


def _read_file_lines(path: Path, source: gzip.GzipFile, recorded: str) -> Iterator[bytes]:
    """Yield all lines of a file except the last line, which has the digest.

    Raise ArchiveError if the digest does not match the lines, or is not `recorded`.
    """
    digest = hashlib.sha256()
    while True:
        data = source.readline(_MAX_LINE)
        if not data.endswith(b"\n"):
            raise ArchiveError(f"{path} {'has a line that is too long' if data else 'ends too early'}")
        if data.startswith(b"end "):
            break
        digest.update(data)
        yield data[:-1]
    if data != f"end {digest.hexdigest()}\n".encode():
        raise ArchiveError(f"{path} was changed after it was written")
    if digest.hexdigest() != recorded:
        raise ArchiveError(f"{path} is not the archive that the ledger recorded: its digest differs")


@contextmanager
def _archive_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into ArchiveError."""
    try:
        yield
    except ArchiveError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ArchiveError(f"{path}: {error}") from error


def check(using: str, path: Path) -> str:
    """Compare a file with the digest that the ledger recorded for it, and return this digest.

    Raise ArchiveError if the file has another digest. Call this before the file's content is used. In a forged file,
    the digest can match the content of the file, but it does not match the digest in the ledger.
    """
    ranges = ArchivedRange.objects.using(using).filter(archive=path.name)
    digests = list(ranges.order_by().values_list("file_digest", flat=True).distinct())
    if not digests:
        raise ArchiveError(
            f"the ledger has no record of the archive {path.name}: it was restored already, or belongs to another"
            " ledger"
        )
    if len(digests) > 1:
        raise ArchiveError(f"the ledger has {len(digests)} different digests for the archive {path.name}")
    with _archive_errors(path), gzip.open(path, "rb") as source:
        for _line in _read_file_lines(path, source, digests[0]):
            pass
    return digests[0]


def files(directory: Path) -> list[Path]:
    """Return the archive files of a directory, sorted by name."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def restore(using: str, path: Path) -> int:
    """Write the batches of a file to the ledger again, and return the number of batches.

    Raise ArchiveError if `check` refuses the file.
    """
    check(using, path)
    shards = set(ArchivedRange.objects.using(using).filter(archive=path.name).values_list("shard", flat=True))
    with transaction.atomic(using=using, durable=True):
        for shard in sorted(shards):
            ShardState.lock(using, shard)
        recorded = check(using, path)  # Check again: perhaps another process has restored the file.
        count = _insert(using, read(path, recorded))
        ArchivedRange.objects.using(using).filter(archive=path.name).update(restored_at=moments.now())
    return count


def _insert(using: str, batches: Iterable[tuple[Batch, list[bytes]]]) -> int:
    """Write batches with their lines to a database. Return the number of batches."""
    count = 0
    for batch, lines in batches:
        batch.pk, applied_at = None, batch.applied_at
        batch.save(using=using, force_insert=True)  # Saving sets `applied_at` to the present.
        Batch.objects.using(using).filter(pk=batch.pk).update(applied_at=applied_at)
        write_lines(using, batch, lines)
        count += 1
    return count


@contextmanager
def opened(using: str, paths: list[Path]) -> Iterator[str]:
    """Load the batches of these files into a temporary database, and yield the alias of this database.

    The database is deleted after the block. Raise ArchiveError if `check` refuses a file.
    """
    recorded = {path: check(using, path) for path in paths}
    with tempfile.TemporaryDirectory(prefix="ratelimits-archive-") as directory:
        alias = f"ratelimits_archive_{os.path.basename(directory)}"  # noqa: PTH119
        connections.databases[alias] = connections.configure_settings(
            {
                "default": {},
                alias: {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(directory) / "archive.sqlite3")},
            }
        )[alias]
        try:
            with connections[alias].schema_editor() as editor:
                for model in (Batch, Line, ArchivedRange):
                    editor.create_model(model)
            for path, digest in recorded.items():
                with transaction.atomic(using=alias):
                    _insert(alias, read(path, digest))
            yield alias
        finally:
            connections[alias].close()
            del connections[alias]
            del connections.databases[alias]
