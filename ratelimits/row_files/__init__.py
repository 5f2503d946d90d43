"""Import and export of memberships, overrides and accounts as CSV files.

This package shows what a file would change, and imports the file as one edit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from django.db import transaction

from ratelimits.models.versions import ConfigVersion, editing
from ratelimits.row_files.comparing import ComparedLine, LineState, compare
from ratelimits.row_files.tables import FileTable, Source

#: A file is imported in portions of many lines. This function is called after each portion that changes rows, with the
#: rows that were added and the rows that were changed.
AfterPortion = Callable[[Sequence[Any], Sequence[Any]], None]


class SeenEffect(NamedTuple):
    """The effect of a file, as a user has seen it.

    digest   the digest of the `FileEffect` that was shown
    version  the version of the configuration at that time
    """

    digest: str
    version: int


class NotImportedError(Exception):
    """Raised if nothing was imported, because lines are wrong and the user did not choose to leave these lines out."""


class ChangedSinceError(Exception):
    """Raised if nothing was imported, because the file would now make other changes than the user has seen.

    `lines` are the lines whose stored rows were changed after the user saw the effect of the file.
    """

    def __init__(self, lines: list[ComparedLine]) -> None:
        super().__init__()
        self.lines = lines


@dataclass(slots=True)
class FileEffect:
    """The effect of a file.

    version  the version of the configuration when the file was compared; for an import, the version that it makes
    counts   the number of lines with each state
    """

    version: int
    counts: Counter[LineState] = field(default_factory=Counter)
    _sha256: Any = field(default_factory=sha256)

    def add(self, line: ComparedLine) -> None:
        """Add a line to the counts and to the digest."""
        self.counts[line.state] += 1
        stored = None if line.stored is None else (line.stored.pk, line.stored.version)
        plan = getattr(line.row, "plan_id", None)
        self._sha256.update(repr((line.number, str(line.state), stored, plan, line.changes)).encode())

    @property
    def digest(self) -> str:
        """Return a digest of all changes, and of the versions of the rows that would be changed."""
        return str(self._sha256.hexdigest())

    @property
    def good(self) -> int:
        """Return the number of lines that an import would write."""
        return self.counts[LineState.NEW] + self.counts[LineState.CHANGED]


def effect_of_file(table: FileTable, source: Source, using: str) -> tuple[FileEffect, Iterator[ComparedLine]]:
    """Return the effect of a file, and an iterator over its compared lines. Nothing is written.

    The effect is complete only when all lines were read from the iterator.
    """
    effect = FileEffect(ConfigVersion.read(using)[0])

    def lines() -> Iterator[ComparedLine]:
        for portion in compare(table, source, using):
            for line in portion:
                effect.add(line)
                yield line

    return effect, lines()


def import_rows(
    table: FileTable, source: Source, using: str, seen: SeenEffect, *, good_only: bool, after_portion: AfterPortion
) -> FileEffect:
    """Write the rows of a file in one edit, and return the effect. `seen` is the effect as the user has seen it.

    If `good_only` is true, lines that are wrong are left out. A file that changes nothing makes no new version of the
    configuration.

    Raise ChangedSinceError if the effect now differs from `seen`. Raise NotImportedError if lines are wrong and
    `good_only` is false. Raise IntegrityError if the database refuses a row. After an exception, nothing is written.
    """
    with editing(using) as edit:
        effect = FileEffect(edit.version)
        changed_since = []
        for portion in compare(table, source, using):
            for line in portion:
                effect.add(line)
                if line.stored is not None and line.stored.version > seen.version:
                    changed_since.append(line)
            new, changed = write(table, portion, using)
            if new or changed:
                after_portion(new, changed)
        if effect.digest != seen.digest:
            raise ChangedSinceError(changed_since)
        if effect.counts[LineState.ERROR] and not good_only:
            raise NotImportedError
        if not effect.good:
            # Nothing was written. So also take back the new version that the edit has made.
            transaction.set_rollback(True, using=using)
    return effect


def write(table: FileTable, portion: Sequence[ComparedLine], using: str) -> tuple[list[Any], list[Any]]:
    """Write the rows of compared lines. Return the rows that were added, and the rows that were changed."""
    changed = [line.row for line in portion if line.state is LineState.CHANGED]
    new = [line.row for line in portion if line.state is LineState.NEW]
    rows: Any = table.model._default_manager.using(using)
    # First change rows, then add rows: perhaps a new row begins when a changed row of the same key ends.
    if changed:
        rows.bulk_update(changed, {change.field for line in portion if line.stored for change in line.changes})
    if new:
        rows.bulk_create(new)
    return new, changed
