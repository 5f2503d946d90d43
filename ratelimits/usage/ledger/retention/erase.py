"""Erasing names in the ledger: replace a customer's account texts and keys in lines, also in archive files.

Lines keep their counters. A batch keeps the digest of its content, so the chain of digests does not change. It gets
another salt, and a note (`ErasedDigest`) says that the digest of its new content stands for the digest that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from django.db import connections
from django.db.models import Model, Q

from ratelimits.models.customers import NameSpan
from ratelimits.salts import SALT_BYTES, Pseudonyms, new_salt
from ratelimits.usage import signatures
from ratelimits.usage.ledger.packet import canonical, checksum, content_digest, header_of, values
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.compact import signed_text
from ratelimits.usage.models import erased
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT, ArchivedRange, Batch, Line

#: How many rows are read or written at once.
_CHUNK = 2000
_KEY, _BIN = SUBJECT.index("key"), SUBJECT.index("bin")


class NotErasedError(ValueError):
    """Raised if names cannot be erased; the message says why."""


class ErasedNames:
    """The names that an erasure replaces: account texts in spans of time, and the keys in their usage."""

    def __init__(self, spans: Sequence[NameSpan], pseudonyms: Pseudonyms) -> None:
        self.pseudonyms = pseudonyms
        ordered = sorted(spans, key=itemgetter(0, 1))
        self.spans = {text: list(group) for text, group in groupby(ordered, key=itemgetter(0))}

    def has(self, account: str, bin_: int) -> bool:
        """Return whether an account text is one of the names at a moment (s since 1970 UTC)."""
        spans = self.spans.get(account, ())
        return any(span.since <= bin_ and (span.until is None or bin_ < span.until) for span in spans)

    def within(self, column: str = "bin", account: str = "account", unit: int = 1) -> Q:
        """Return the condition for rows with one of these names at the moment in a column.

        `unit` says how many of the column's units are a second.
        """
        condition = Q(pk__in=())  # matches nothing
        for text, spans in self.spans.items():
            for span in spans:
                one = Q(**{account: text, f"{column}__gte": span.since * unit})
                condition |= one if span.until is None else one & Q(**{f"{column}__lt": span.until * unit})
        return condition

    def replaced(self, account: str, key: str) -> tuple[str, str]:
        """Return the pseudonyms of an account and a key."""
        return self.pseudonyms.account(account), self.pseudonyms.key(key)

    def replace_line(self, row: Sequence[Any]) -> list[Any] | None:
        """Return the values of a line with pseudonyms; None if the line has none of the names."""
        if not self.has(str(row[0]), int(row[_BIN])):
            return None
        return [*self.replaced(str(row[0]), str(row[_KEY])), *row[_KEY + 1 :]]


def erase_lines(using: str, names: ErasedNames) -> int:
    """Replace the names in the ledger's lines. Return the number of changed lines.

    The shards with usage of these names must be locked. Raise NotErasedError if a batch does not match its digest.
    """
    lines = Line.objects.using(using).filter(names.within())
    pks = sorted(set(lines.values_list("batch_id", flat=True)))
    count = 0
    for batch in Batch.objects.using(using).in_bulk(pks).values():
        rows = batch.lines().values_list("pk", *SUBJECT, *COUNTERS).iterator(_CHUNK)
        before, after, changed = [], [], []
        for pk, *row in rows:
            before.append(canonical(row))
            new = names.replace_line(row)
            after.append(before[-1] if new is None else canonical(new))
            if new is not None:
                changed.append((*new[: _KEY + 1], checksum(after[-1]), pk))
        _resalt(using, batch, before, after)
        batch.save(using=using, update_fields=["salt", "part_salts", "signature"])
        write_names(using, Line, ("account", "key", "checksum"), changed)
        count += len(changed)
    return count


def write_names(using: str, model: type[Model], columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Write values to columns of rows. Each tuple has the values, then the primary key of its row."""
    quote = connections[using].ops.quote_name
    assignments = ", ".join(f"{quote(name)} = %s" for name in columns)
    statement = f"UPDATE {quote(model._meta.db_table)} SET {assignments} WHERE {quote('id')} = %s"  # noqa: S608
    with connections[using].cursor() as cursor:
        for first in range(0, len(rows), _CHUNK):
            cursor.executemany(statement, rows[first : first + _CHUNK])


def _resalt(using: str, batch: Batch, before: Sequence[bytes], after: Sequence[bytes]) -> None:
    """Give a batch another salt, and note the digest of its new content. `before` and `after` are its lines.

    A joined batch is signed again. Without the check before it, an erasure would sign what somebody has changed.
    """
    unchanged = erased.is_of(using, content_digest(header_of(batch), before), batch.content)
    if not unchanged or (batch.parts and signatures.error_of(signed_text(batch), batch.signature)):
        raise NotErasedError(f"batch {batch} does not match its digest or its signature: run ratelimits_verify")
    batch.salt = new_salt()
    # Nobody can find a name by trying names in the digests of the parts, since their salts are gone.
    batch.part_salts = bytes(SALT_BYTES * len(batch.contents()))
    if batch.parts:
        batch.signature = signatures.sign(signed_text(batch))
    erased.note(using, [(batch.content, content_digest(header_of(batch), after))])


def erase_archive(using: str, path: Path, names: ErasedNames) -> Path | None:
    """Write an archive file without the names beside the file at `path`, and record it in place of that file.

    Return the path of the new file; None if the file has none of the names. Call this in the transaction of the
    erasure, and delete the old file after the commit (`delete_replaced`). Raise ArchiveError if the file is not the
    archive that the ledger recorded.
    """
    recorded = archive.check(using, path)
    if not any(names.replace_line(values(line)) for _batch, lines in archive.read(path, recorded) for line in lines):
        return None
    partial = path.with_name(f"{_base(path)}-{new_salt()[:8]}{archive.SUFFIX}")
    digest = archive.write(partial, _without_names(using, archive.read(path, recorded), names))
    for _batch, _lines in archive.read(partial, digest):
        pass  # If the file cannot be read, this raises an error, and the old file stays.
    rows = ArchivedRange.objects.using(using).filter(archive=path.name)
    rows.update(archive=partial.name, file_digest=digest)
    return partial


def _without_names(using: str, batches: Iterable[tuple[Batch, list[bytes]]], names: ErasedNames) -> Iterator[bytes]:
    """Yield the lines of an archive file with pseudonyms instead of these names."""
    yield archive.HEADER
    for batch, lines in batches:
        replaced = [line if (new := names.replace_line(values(line))) is None else canonical(new) for line in lines]
        if replaced != lines:
            _resalt(using, batch, lines, replaced)
        yield archive.batch_row(batch)
        yield from replaced


def _base(path: Path) -> str:
    """Return the part of an archive's name that says which batches it has, such as "07-1-99"."""
    return "-".join(path.name.removesuffix(archive.SUFFIX).split("-")[:3])


def delete_replaced(using: str, directory: Path) -> list[Path]:
    """Delete the archive files in a directory that an erasure replaced by others, and return their paths.

    If an erasure was interrupted, such files are left: with the names, or of the attempt.
    """
    recorded = set(ArchivedRange.all_ranges.using(using).values_list("archive", flat=True))
    bases = {_base(Path(name)) for name in recorded}
    old = [path for path in archive.files(directory) if path.name not in recorded and _base(path) in bases]
    for path in old:
        path.unlink()
    return old
