from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from django.core.management import CommandError, call_command

from ratelimits.billing.reports.exports import DOWNLOADS, FORMATS, Format
from tests.support.reports.invoices import account, close, spend
from tests.support.terminal import Terminal, plain
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def _finalised() -> None:
    """Finalise November of one account: 7 requests, 5 of them included."""
    spend(account(included=5), "2026-11-10T12:00", cost=7)
    close("2026-12-02")


def report(**options: Any) -> str:
    out = io.StringIO()
    call_command("ratelimits_report", period="2026-11", stdout=out, **options)
    return out.getvalue()


@pytest.mark.usefixtures("_finalised")
def test_the_format_is_what_the_file_s_name_ends_in(tmp_path: Path) -> None:
    for name in ("november.csv", "november.json", "november.xlsx", "november.ndjson"):
        assert report(output=str(tmp_path / name)) == ""
    assert (tmp_path / "november.csv").read_text() == report()
    assert json.loads((tmp_path / "november.json").read_text())["lines"][0]["overage_quantity"] == "2"
    assert openpyxl.load_workbook(tmp_path / "november.xlsx").active["E2"].value == "acme"
    assert json.loads((tmp_path / "november.ndjson").read_text())["subject"] == "acme"


@pytest.mark.usefixtures("_finalised")
def test_people_can_read_the_report_as_a_table() -> None:
    headers, line = report(format="table", no_color=True).splitlines()
    assert headers.split() == ["account", "key", "meter", "used", "included", "over", "refused", "month", "status"]
    assert line.split()[0] == "acme"
    assert {"requests", "7", "5", "2", "2026-11", "final"} <= set(line.split())


def test_a_file_gets_no_table(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="only printed"):
        report(format="table", output=str(tmp_path / "november.csv"))


def test_no_two_formats_write_files_of_one_name() -> None:
    assert len({form.suffix for form in FORMATS.values()}) == len(FORMATS)


@pytest.mark.usefixtures("_finalised")
@pytest.mark.parametrize("form", DOWNLOADS.values(), ids=lambda form: form.name)
def test_a_file_named_as_downloads_are_is_of_that_format(form: Format, tmp_path: Path) -> None:
    named, asked = tmp_path / f"Usage-2026-11{form.suffix.upper()}", tmp_path / "asked"
    report(output=str(named))
    report(output=str(asked), format=form.name)
    assert named.read_bytes() == asked.read_bytes()


@pytest.mark.usefixtures("_finalised")
def test_a_named_format_counts_more_than_the_file_s_name(tmp_path: Path) -> None:
    report(output=str(tmp_path / "events.json"), format="cloudevents")
    (event,) = json.loads((tmp_path / "events.json").read_text())
    assert event["type"] == "ratelimits.report.line.v1"


@pytest.mark.usefixtures("_finalised")
def test_a_finalised_report_written_twice_is_the_same_file_in_every_format(tmp_path: Path) -> None:
    for name in ("csv", "json", "xlsx", "cloudevents", "cloudevents-ndjson"):
        paths = [tmp_path / f"{number}.{name}" for number in range(2)]
        for path in paths:
            report(output=str(path), format=name)
        assert paths[0].read_bytes() == paths[1].read_bytes() != b""


def test_a_provisional_line_is_an_event_of_another_type() -> None:
    spend("acme", "2026-11-10T12:00")
    flow()
    assert json.loads(report(format="cloudevents-ndjson"))["type"] == "ratelimits.report.provisional-line.v1"


@pytest.mark.usefixtures("_finalised")
def test_a_file_that_is_there_is_replaced_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "november.csv"
    path.write_text("before")
    with pytest.raises(CommandError, match="write it like 2026-11"):
        call_command("ratelimits_report", period="2026-13", output=str(path))
    assert path.read_text() == "before"
    report(output=str(path))
    assert path.read_text() == report()
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"no/november.csv could not be written: No such file or directory"):
        report(output=str(tmp_path / "no" / "november.csv"))


def test_a_workbook_is_not_printed() -> None:
    with pytest.raises(CommandError, match="name a file with --output"):
        report(format="xlsx")


def test_without_xlsxwriter_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimits.billing.reports.exports.find_spec", lambda _name: None)
    with pytest.raises(CommandError, match=r"pip install 'django-ratelimits\[xlsx\]'"):
        report(format="xlsx")


@pytest.mark.usefixtures("_finalised")
def test_standard_output_gets_the_bytes_of_the_file_whatever_its_encoding() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, "ascii")
    spend(account("Ünïcödé"), "2026-11-10T12:00")
    flow()
    call_command("ratelimits_report", period="2026-11", stdout=out)
    assert raw.getvalue().decode() == report()
    assert "Ünïcödé" in report()


@pytest.mark.usefixtures("_finalised")
def test_a_terminal_is_shown_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    report(output=str(tmp_path / "november.csv"), stderr=terminal.file)
    shown = terminal.read()
    assert "━" in shown
    assert "1/1" in shown


@pytest.mark.usefixtures("_finalised")
def test_without_rich_a_terminal_is_shown_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    report(output=str(tmp_path / "november.csv"), stderr=terminal.file)
    # On a busy machine the count is drawn more than once.
    assert "lines: 1" in [line.strip() for line in plain(terminal.read()).splitlines()]


@pytest.mark.usefixtures("_finalised")
def test_what_is_no_terminal_is_shown_no_progress(tmp_path: Path) -> None:
    said = io.StringIO()
    report(output=str(tmp_path / "november.csv"), stderr=said)
    (line,) = said.getvalue().splitlines()
    assert line.startswith("Usage is complete until ")
