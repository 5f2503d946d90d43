"""Retention: old batches go from the ledger to compressed files, one for each shard and run, and can come back.

A file is text: a header line, then for each batch its row as JSON and its canonical lines, then a line with the digest
of all before. It is written, fsynced and read back before anything leaves the ledger.
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
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from django.db import connections, transaction
from django.db.models import F, Min, Q

from ratelimits.models.ledger import COUNTERS, SUBJECT, ArchivedRange, Batch, Line, ProcessTotal, ShardState
from ratelimits.models.reports import PeriodUsage
from ratelimits.usage.apply import write_lines
from ratelimits.usage.packet import canonical

_HEADER = "ratelimits archive 1"
SUFFIX = ".ratelimits.gz"
_FIELDS = [field.attname for field in Batch._meta.concrete_fields if field.attname not in ("id", "applied_at")]
_CHUNK = 2000
#: Seconds after midnight UTC at which a date begins somewhere.
_DAWN = 10 * 3600
#: Bytes of the longest text in a file: a batch's row with the digests of the parts of which it was joined.
_LONGEST_TEXT = 1 << 22


class ArchiveError(ValueError):
    """An archive that cannot be written or read; the message says why."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was moved out of one shard."""

    shard: int
    path: Path
    batches: int
    lines: int


def prune(using: str, before: int, directory: Path) -> Iterator[Pruned]:
    """Move the batches that hold nothing but usage of periods that began before a moment (s since 1970) to files.

    What processes said they were granted before it is dropped: the reports state what came of it.
    Raises ArchiveError while such a period is not finalised. Interrupted anywhere, it can be run again.
    """
    rows = PeriodUsage.objects.using(using).filter(period__lt=before)
    still_open = rows.filter(Q(covered=None) | Q(position__gt=F("covered"))).order_by("period").first()
    if still_open is not None:
        raise ArchiveError(f"the usage {still_open} is not in a finalised report yet: finalise it first")
    directory.mkdir(parents=True, exist_ok=True)
    for shard in ShardState.objects.using(using).order_by("shard").values_list("shard", flat=True):
        newer = Line.objects.using(using).filter(period__gte=before, batch__shard=shard)
        end = newer.aggregate(first=Min("batch__first_position"))["first"]
        batches = Batch.objects.using(using).filter(shard=shard).order_by("position")
        tallied = ShardState.objects.using(using).get(shard=shard).tallied
        old = batches.filter(position__lt=end) if end is not None else batches.filter(position__lte=tallied)
        found = old.aggregate(first=Min("first_position"))["first"]
        if found is not None:
            yield _prune_shard(using, shard, list(old), directory)
    left = Line.objects.using(using).filter(bin__lt=before).aggregate(first=Min("bin"))["first"]
    end = before if left is None else day_of(left)
    ProcessTotal.objects.using(using).filter(kind="admitted", bin__lt=end)._raw_delete(using)


def day_of(seconds: int) -> int:
    """Return when the day starts that a moment lies in, both in s since 1970 UTC.

    Such days begin when a date does at the earliest place on earth, at 10:00 UTC, as the months do by which usage is
    archived. What processes said is kept for whole days, of which the ledger has no line any more.
    """
    return (seconds - _DAWN) // 86_400 * 86_400 + _DAWN


def _prune_shard(using: str, shard: int, batches: list[Batch], directory: Path) -> Pruned:
    name = f"{shard:02d}-{batches[0].first_position}-{batches[-1].position}{SUFFIX}"
    path = directory / name
    digest = _write(path, batches)
    for _batch, _lines in read(path, digest):
        pass  # what cannot be read back must not be deleted
    lines = 0
    with transaction.atomic(using=using, durable=True):
        ShardState.lock(using, shard)
        now = Batch.objects.using(using).filter(shard=shard, position__lte=batches[-1].position).order_by("position")
        if list(now.values_list("pk", flat=True)) != [batch.pk for batch in batches]:
            path.unlink()
            raise ArchiveError(f"batches of shard {shard:02d} were joined while they were written: prune again")
        for incarnation, group in groupby(batches, key=lambda batch: batch.incarnation):
            part = list(group)
            ArchivedRange.objects.using(using).create(
                archive=name,
                shard=shard,
                incarnation=incarnation,
                # One that was missing first and came late stands out of order.
                first_seq=min(batch.first_seq for batch in part),
                last_seq=max(batch.seq for batch in part),
                first_position=part[0].first_position,
                last_position=part[-1].position,
                previous_digest=part[0].previous_digest,
                digest=part[-1].digest,
                file_digest=digest,
            )
        for batch in batches:
            lines += batch.lines().order_by()._raw_delete(using)
        Batch.objects.using(using).filter(shard=shard, position__lte=batches[-1].position)._raw_delete(using)
    return Pruned(shard, path, len(batches), lines)


def _write(path: Path, batches: list[Batch]) -> str:
    """Write the file whole or not at all; the digest that it ends with."""
    digest = hashlib.sha256()
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as raw:
        # Without a name and a time in its header the same batches make the same file.
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as out:
            for text in _texts(batches):
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


def _texts(batches: list[Batch]) -> Iterator[bytes]:
    yield _HEADER.encode()
    for batch in batches:
        values = {name: getattr(batch, name) for name in _FIELDS}
        yield json.dumps({**values, "parts": bytes(batch.parts).hex()}, sort_keys=True).encode()
        for row in batch.lines().values_list(*SUBJECT, *COUNTERS).iterator(_CHUNK):
            yield canonical(row)


def read(path: Path, recorded: str) -> Iterator[tuple[Batch, list[bytes]]]:
    """Yield the batches of a file, not saved, each with its canonical lines.

    Raises ArchiveError for a file that is not whole, or whose digest is not the recorded one: at its end, so whoever
    keeps the batches does so in a transaction.
    """
    with _errors(path), gzip.open(path, "rb") as source:
        if next(texts := _read_texts(path, source, recorded)) != _HEADER.encode():
            raise ArchiveError(f"{path} is no archive of a ledger")
        for head in texts:
            values: dict[str, Any] = json.loads(head)
            batch = Batch(**{**values, "parts": bytes.fromhex(values["parts"])})
            lines = list(islice(texts, batch.line_count))
            if len(lines) != batch.line_count:
                raise ArchiveError(f"{path} ends too early")
            yield batch, lines


def _read_texts(path: Path, source: gzip.GzipFile, recorded: str) -> Iterator[bytes]:
    """Yield the lines of a file but the last, which has their digest."""
    digest = hashlib.sha256()
    while True:
        data = source.readline(_LONGEST_TEXT)
        if not data.endswith(b"\n"):
            raise ArchiveError(f"{path} {'has a line that is too long' if data else 'ends too early'}")
        if data.startswith(b"end "):
            break
        digest.update(data)
        yield data[:-1]
    if data != f"end {digest.hexdigest()}\n".encode():
        raise ArchiveError(f"{path} was changed after it was written")
    if digest.hexdigest() != recorded:
        raise ArchiveError(f"{path} is not the file that the ledger's batches were moved to: its digest is another one")


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except ArchiveError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ArchiveError(f"{path}: {error}") from error


def check(using: str, path: Path) -> str:
    """Return the digest of a file, once it is known to be the file that the ledger's batches were moved to.

    Raise ArchiveError if it is another one. Nothing of it is kept before: whoever can make a file can also make one
    that bears its own digest.
    """
    ranges = ArchivedRange.objects.using(using).filter(archive=path.name)
    digests = list(ranges.order_by().values_list("file_digest", flat=True).distinct())
    if not digests:
        raise ArchiveError(f"the ledger knows of no archive {path.name}: it was restored already, or is another's")
    if len(digests) > 1:
        raise ArchiveError(f"the ledger has {len(digests)} digests of the archive {path.name}: which is right?")
    with _errors(path), gzip.open(path, "rb") as source:
        for _text in _read_texts(path, source, digests[0]):
            pass
    return digests[0]


def files(directory: Path) -> list[Path]:
    """The archive files of a directory, in order."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def restore(using: str, path: Path) -> int:
    """Bring the batches of a file back into the ledger; how many there were."""
    check(using, path)
    shards = set(ArchivedRange.objects.using(using).filter(archive=path.name).values_list("shard", flat=True))
    with transaction.atomic(using=using, durable=True):
        for shard in sorted(shards):
            ShardState.lock(using, shard)
        recorded = check(using, path)  # another may have restored it meanwhile
        count = _insert(using, read(path, recorded))
        ArchivedRange.objects.using(using).filter(archive=path.name).delete()
    return count


def _insert(using: str, batches: Iterable[tuple[Batch, list[bytes]]]) -> int:
    count = 0
    for batch, lines in batches:
        batch.pk = None
        batch.save(using=using, force_insert=True)
        write_lines(using, batch, lines)
        count += 1
    return count


@contextmanager
def opened(using: str, paths: list[Path]) -> Iterator[str]:
    """A database alias under which the batches of these files can be queried; gone when the block is left.

    Raises ArchiveError for a file that is not the one whose digest the ledger recorded.
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
