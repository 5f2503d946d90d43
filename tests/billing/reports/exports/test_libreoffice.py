from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.rows import COLUMNS, Row
from tests.billing.reports.exports.samples import AWKWARD, ROW, awkward, rows

pytestmark = pytest.mark.system

Convert = Callable[[Iterable[Row], str], Path]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Let LibreOffice open a workbook of rows, calculate its formulae, and write it in another format."""

    def convert(found: Iterable[Row], kind: str) -> Path:
        book = tmp_path / "report.xlsx"
        book.write_bytes(b"".join(FORMATS["xlsx"].stream(found)))
        profile = f"-env:UserInstallation={(tmp_path / 'profile').as_uri()}"
        command = ["soffice", "--headless", "--norestore", profile, "--convert-to", kind, "--outdir", str(tmp_path)]
        subprocess.run([*command, str(book)], check=True, capture_output=True, timeout=120)
        return book.with_suffix(f".{kind.partition(':')[0]}")

    return convert


def test_the_workbook_opens_and_nothing_in_it_is_worked_out(converted: Convert) -> None:
    # UTF-8, commas, cells as they are shown.
    path = converted(awkward(), "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,false,true,false")
    with path.open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == COLUMNS
    assert [line["account"] for line in read] == list(AWKWARD)
    assert {(line["consumed_quantity"], line["limit"], line["admitted_count"]) for line in read} == {("8", "8", "8")}


def text_of(path: Path, *options: str) -> str:
    command = ["pdftotext", *options, str(path), "-"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_line_is_printed_across_pages_each_with_its_header_and_the_key(converted: Convert, tmp_path: Path) -> None:
    path = converted([ROW, *rows(50)], "pdf")
    text = text_of(path, "-layout")
    pages = [page.splitlines() for page in text.split("\f") if page.strip()]
    assert len(pages) == 4 + 1, (
        "a line takes four pages side by side, and 51 lines as much as one below; then the totals"
    )
    *pages, totals = pages
    assert totals[0].split()[:4] == ["row", "account", "customer", "status"]
    headers = [page[0].split() for page in pages]
    assert [name for header in headers for name in header if name != "key" or header is headers[0]] == list(COLUMNS)
    assert all("key" in header for header in headers)
    (first, *_lines) = lines = list(zip(*(page[1:52] for page in pages), strict=True))
    assert len(lines) == 51
    assert first[0].split()[:5] == [ROW.report_id, "1", "final", ROW.line_id, "acme"]
    assert "2026-11-01T12:15:00Z" in "".join(first)
    assert all(part.split()[0] == ROW.key for part in first[1:])
    assert "###" not in text
    image = tmp_path / "page"
    subprocess.run(["pdftoppm", "-gray", "-r", "150", "-singlefile", str(path), str(image)], check=True)
    assert 0.005 < _darkness(image.with_suffix(".pgm")) < 0.2


def test_a_printed_page_can_be_read(converted: Convert) -> None:
    boxes = text_of(converted([ROW, *rows(50)], "pdf"), "-bbox")
    heights = [float(low) - float(high) for high, low in re.findall(r'yMin="([\d.]+)" \S+ yMax="([\d.]+)"', boxes)]
    assert min(heights) > 7.5, "in points; print in small type is 7 to 8"


def test_a_long_durability_gap_is_printed_whole(converted: Convert) -> None:
    gap = "; ".join(
        f"restart 2026-11-0{day}T10:00:00Z/2026-11-0{day}T10:00:02Z appendfsync=everysec" for day in range(1, 8)
    )
    boxes = text_of(converted([ROW._replace(durability_gap=gap)] * 3, "pdf"), "-bbox")
    tops = sorted(float(top) for top in re.findall(r'yMin="([\d.]+)" \S+ \S+>restart<', boxes))
    assert len(tops) == 3 * 7
    assert all(lower - upper > 6 for upper, lower in pairwise(tops)), "a text runs over the one of the next line"


def _darkness(path: Path) -> float:
    """Return the share of dark pixels in a picture (PGM, one byte each)."""
    points = path.read_bytes().split(b"\n", 3)[3]
    return sum(point < 128 for point in points) / len(points)
