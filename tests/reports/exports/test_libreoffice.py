from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ratelimits.reports.exports import FORMATS
from ratelimits.reports.rows import COLUMNS, Row
from tests.reports.exports.samples import AWKWARD, ROW, awkward, rows

pytestmark = pytest.mark.system

Convert = Callable[[Iterable[Row], str], Path]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Open a workbook of rows in LibreOffice and have it written as something else; its formulae are worked out."""

    def convert(found: Iterable[Row], kind: str) -> Path:
        book = tmp_path / "report.xlsx"
        book.write_bytes(b"".join(FORMATS["xlsx"].stream(found)))
        profile = f"-env:UserInstallation={(tmp_path / 'profile').as_uri()}"
        command = ["soffice", "--headless", "--norestore", profile, "--convert-to", kind, "--outdir", str(tmp_path)]
        subprocess.run([*command, str(book)], check=True, capture_output=True, timeout=120)
        return book.with_suffix(f".{kind.partition(':')[0]}")

    return convert


def test_the_workbook_opens_and_nothing_in_it_is_worked_out(converted: Convert) -> None:
    # UTF-8, commas, contents as they are shown.
    path = converted(awkward(), "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,false,true,false")
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS
    assert [line["account"] for line in read] == list(AWKWARD)
    assert {(line["consumed_quantity"], line["limit"], line["admitted_count"]) for line in read} == {("8", "8", "8")}


def test_a_page_shows_the_header_the_lines_and_moments_in_utc(converted: Convert, tmp_path: Path) -> None:
    path = converted([ROW, *rows(50)], "pdf")
    text = subprocess.run(["pdftotext", "-layout", str(path), "-"], check=True, capture_output=True, text=True).stdout
    header, first, *lines = text.splitlines()
    assert tuple(header.split()) == COLUMNS
    assert first.split()[:5] == [ROW.report_id, "1", "final", ROW.line_id, "acme"]
    assert "2026-11-01T12:15:00Z" in first
    assert "###" not in text
    assert len(lines) >= 50
    image = tmp_path / "page"
    subprocess.run(["pdftoppm", "-gray", "-r", "150", "-singlefile", str(path), str(image)], check=True)
    assert 0.005 < _darkness(image.with_suffix(".pgm")) < 0.2


def _darkness(path: Path) -> float:
    """The share of dark points in a picture (PGM, a byte each)."""
    points = path.read_bytes().split(b"\n", 3)[3]
    return sum(point < 128 for point in points) / len(points)
