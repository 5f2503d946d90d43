from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratelimits.billing.reports.exports import FORMATS, Format
from ratelimits.billing.reports.rows import Row
from ratelimits.files import SIZE
from tests.billing.reports.exports.samples import fed, rows
from tests.support.once import made_once

ROOT = Path(__file__).resolve().parents[4]
MEGABYTE = 1 << 20

every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)


class Watched(str):
    """An account's name that only one row has: it can be seen when the name is freed, which a row (a tuple) does not
    show.
    """

    __slots__ = ("__weakref__",)


class Counting:
    """Rows that count how many were asked for, and how many existed at the same time at most."""

    def __init__(self, count: int) -> None:
        self.count, self.read, self.alive, self.most = count, 0, 0, 0

    def __iter__(self) -> Iterator[Row]:
        for row in rows(self.count):
            watched = row._replace(account=Watched(row.account))
            weakref.finalize(watched.account, self._gone)
            self.read += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield watched

    def _gone(self) -> None:
        self.alive -= 1


@every_format
def test_no_more_than_a_few_rows_are_held_however_many_there_are(form: Format) -> None:
    counting = Counting(3_000)
    for chunk in form.stream(fed(form, counting)):
        assert len(chunk) < SIZE * 2
    assert counting.read == 3_000
    assert counting.most <= 3


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"xlsx", "xlsx-amounts"}))
def test_a_first_chunk_comes_before_the_rows_are_all_read(name: str) -> None:
    counting = Counting(3_000)
    next(FORMATS[name].stream(fed(FORMATS[name], counting)))
    assert counting.read < 600


@every_format
def test_nothing_is_read_before_the_first_chunk_is_asked_for(form: Format) -> None:
    counting = Counting(10)
    form.stream(fed(form, counting))
    assert counting.read == 0


@every_format
def test_an_error_on_the_way_comes_through_and_leaves_nothing_behind(
    form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def broken() -> Iterator[Row]:
        yield from rows(3)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        list(form.stream(fed(form, broken())))
    assert list(tmp_path.iterdir()) == []


@every_format
def test_a_reader_that_goes_away_leaves_nothing_behind(
    form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stream = form.stream(fed(form, rows(1_000)))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


@every_format
def test_the_same_rows_give_the_same_bytes(form: Format) -> None:
    first, second = (b"".join(form.stream(fed(form, rows(500)))) for _ in range(2))
    assert first == second


@pytest.fixture(scope="module")
def peaks(
    long_run: bool, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """Return, by format, the peak memory in bytes of a process that exports few rows, and then after many."""
    counts = ("1000", "200000" if long_run else "10000")
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-m", "tests.billing.reports.exports.samples", *counts]

    def make(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with (folder / "printed").open("w") as printed:
            subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=printed)

    printed = (made_once("peaks", pytestconfig, tmp_path_factory, make) / "printed").read_text()
    found: dict[str, list[int]] = {}
    for name, _count, _size, peak, _seconds in map(str.split, printed.splitlines()):
        found.setdefault(name, []).append(int(peak))
    return found


@every_format
def test_memory_does_not_grow_with_the_report(form: Format, peaks: dict[str, list[int]]) -> None:
    few, many = peaks[form.name]
    assert many - few < 5 * MEGABYTE
    assert many < 100 * MEGABYTE
