"""Look at what a file would change, and import it: all of it as one edit, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from django.db import transaction

from ratelimits.models.versions import ConfigVersion, editing
from ratelimits.row_files.comparing import ComparedLine, LineState, compare
from ratelimits.row_files.reading import Source
from ratelimits.row_files.tables import FileTable

#: Receives the rows that were added and those that were changed, once for each portion.
Written = Callable[[Sequence[Any], Sequence[Any]], None]


class Seen(NamedTuple):
    """What somebody was shown: the digest of a FileDifference, and the version of the configuration then."""

    digest: str
    version: int


class NotImportedError(Exception):
    """Raised when nothing was imported, since lines are wrong and nobody asked to leave them out."""


class ChangedSinceError(Exception):
    """Raised when nothing was imported, since a file would no longer do what was shown.

    `lines` has those whose row was changed since.
    """

    def __init__(self, lines: list[ComparedLine]) -> None:
        super().__init__()
        self.lines = lines


@dataclass(slots=True)
class FileDifference:
    """What a file would do: the number of lines of each state, and a digest of all that they would do.

    `version` is that of the configuration before it was compared.
    """

    version: int
    counts: Counter[LineState] = field(default_factory=Counter)
    _sha256: Any = field(default_factory=sha256)

    def add(self, line: ComparedLine) -> None:
        """Count a line."""
        self.counts[line.state] += 1
        stored = None if line.stored is None else (line.stored.pk, line.stored.version)
        plan = getattr(line.row, "plan_id", None)
        self._sha256.update(repr((line.number, str(line.state), stored, plan, line.changes)).encode())

    @property
    def digest(self) -> str:
        """Return the digest of the lines, and of the versions of the rows that they are about."""
        return str(self._sha256.hexdigest())

    @property
    def good(self) -> int:
        """Return the number of lines that would be written."""
        return self.counts[LineState.NEW] + self.counts[LineState.CHANGED]


def differences(table: FileTable, source: Source, using: str) -> tuple[FileDifference, Iterator[ComparedLine]]:
    """Return what a file would do, filled in while its lines are read from the iterator; nothing is written."""
    difference = FileDifference(ConfigVersion.read(using)[0])

    def lines() -> Iterator[ComparedLine]:
        for portion in compare(table, source, using):
            for line in portion:
                difference.add(line)
                yield line

    return difference, lines()


def import_rows(
    table: FileTable, source: Source, using: str, seen: Seen, *, good_only: bool, written: Written
) -> FileDifference:
    """Write the rows of a file in one edit, and return what it did. `seen` is what was shown before.

    Raises ChangedSinceError if it would do anything else now; NotImportedError if lines are wrong, unless `good_only`
    leaves them out; IntegrityError if the database refuses a row. Then nothing is written. A file that changes nothing
    takes no version.
    """
    with editing(using) as edit:
        done = FileDifference(edit.version)
        changed_since = []
        for portion in compare(table, source, using):
            for line in portion:
                done.add(line)
                if line.stored is not None and line.stored.version > seen.version:
                    changed_since.append(line)
            _write(table, portion, using, written)
        if done.digest != seen.digest:
            raise ChangedSinceError(changed_since)
        if done.counts[LineState.ERROR] and not good_only:
            raise NotImportedError
        if not done.good:
            transaction.set_rollback(True, using=using)
    return done


def _write(table: FileTable, portion: Sequence[ComparedLine], using: str, written: Written) -> None:
    changed = [line.row for line in portion if line.state is LineState.CHANGED]
    new = [line.row for line in portion if line.state is LineState.NEW]
    rows: Any = table.model._default_manager.using(using)
    # First the changes: a row gets its end before the one after it, which may have none, is added.
    if changed:
        rows.bulk_update(changed, {change.field for line in portion if line.stored for change in line.changes})
    if new:
        rows.bulk_create(new)
    if new or changed:
        written(new, changed)
