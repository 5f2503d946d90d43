"""Test the progress that commands show on a terminal, with `rich` and without it."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from django.core.management.base import BaseCommand
from django.core.management.color import no_style

from ratelimits.as_code import dump, to_text
from ratelimits.management.progress import shown
from ratelimits.models import Rule
from ratelimits.progress import Progress
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import ShardState
from tests.support.reports.invoices import account, spend
from tests.support.rows import rule as make_rule
from tests.support.terminal import BAR, Terminal, on_a_terminal, plain, stages
from tests.support.usage.traffic import at, opened_late


@pytest.fixture(autouse=True)
def _terminal_of_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def _without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)


def command(stdout: Any, stderr: Any) -> BaseCommand:
    made = BaseCommand(stdout=stdout, stderr=stderr)
    made.style = no_style()
    return made


def work(stdout: Any, stderr: Any, **options: Any) -> None:
    """Do four things, and write a line after each. In the middle, wait until a terminal has shown the progress."""
    running, count, drawn = command(stdout, stderr), 0, threading.Semaphore(0)

    def done() -> int:
        drawn.release()
        return count

    with shown(running, **options) as progress:
        progress.begin("things", 4, done)
        for count in range(1, 5):
            running.stdout.write(f"line {count}")
            if count == 2 and progress_is_shown(running, **options):
                for _time in range(3):  # The third one begins after the second one was drawn.
                    assert drawn.acquire(timeout=30)


def progress_is_shown(running: BaseCommand, *, alone: bool = False) -> bool:
    return running.stderr.isatty() and not (alone and running.stdout.isatty())


def test_a_person_sees_how_much_is_done_and_how_fast_and_when_it_ends() -> None:
    terminal = Terminal()
    work(io.StringIO(), terminal.file)
    text = plain(terminal.read())
    assert BAR in text
    assert re.search(r"things .*2/4 \d+\.\d/s ", text)
    assert re.search(r"things .*4/4 \d+\.\d/s 0:00:0\d", text)


def test_a_stage_of_unknown_length_is_one_and_an_empty_one_is_none() -> None:
    progress = Progress()
    for total in (0, None):
        progress.begin(f"{total} things", total, int)
    assert [stage.what for stage in progress.stages] == ["None things"]


@pytest.mark.usefixtures("_without_rich")
def test_the_time_left_is_that_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, drawn, began = Terminal(), threading.Semaphore(0), monotonic()
    monkeypatch.setattr("ratelimits.management.progress.monotonic", lambda: began + 60)

    def done() -> int:
        drawn.release()
        return 3

    with shown(command(io.StringIO(), terminal.file)) as progress:
        progress.begin("things", 4, done)
        for _time in range(2):  # The second one begins after the first one was drawn.
            assert drawn.acquire(timeout=30)
    assert "things: 3 of 4, 0.1/s, 20 s left" in plain(terminal.read())


@pytest.mark.usefixtures("_without_rich")
def test_without_rich_a_line_says_the_same() -> None:
    terminal = Terminal()
    work(io.StringIO(), terminal.file)
    text = plain(terminal.read())
    assert re.search(r"things: 2 of 4, \d+\.?\d*/s, \d s left", text)
    assert text.endswith("things: 4\r\n")
    assert text.count("\n") == 1


@pytest.mark.parametrize("rich", [True, False])
def test_what_a_command_writes_stays_readable_above_the_progress(rich: bool, request: pytest.FixtureRequest) -> None:
    if not rich:
        request.getfixturevalue("_without_rich")
    terminal = Terminal()
    work(terminal.file, terminal.file)
    lines = [line.rsplit("\r", 1)[-1].strip() for line in plain(terminal.read()).replace("\r\n", "\n").split("\n")]
    assert [line for line in lines if line.startswith("line")] == [f"line {number}" for number in range(1, 5)]


def test_nothing_is_shown_in_a_pipe_or_beside_data_on_the_same_terminal() -> None:
    out, error, terminal = io.StringIO(), io.StringIO(), Terminal()
    work(out, error)
    assert (out.getvalue(), error.getvalue()) == ("line 1\nline 2\nline 3\nline 4\n", "")
    work(terminal.file, terminal.file, alone=True)
    assert terminal.read().splitlines() == [f"line {number}" for number in range(1, 5)]


def test_an_error_ends_the_progress() -> None:
    terminal = Terminal()

    def fail() -> None:
        with shown(command(io.StringIO(), terminal.file)) as progress:
            list(map((1).__truediv__, progress.counted("things", (3, 2, 1, 0), 4)))

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "3/3" in plain(terminal.read())
    assert "ratelimits-progress" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.django_db(transaction=True)
def test_each_long_command_shows_its_stages(tmp_path: Path) -> None:
    make_rule()
    spend(account(included=5), "2025-01-10T12:00", cost=7)
    opened_late()
    seal()
    assert stages(on_a_terminal("ratelimits_drain", rebuild_totals=True)) == {"batches", "shards", "kinds of totals"}
    ShardState.objects.update(watermark=at("2025-02-02"))
    assert "customers" in on_a_terminal("ratelimits_finalise")
    assert stages(on_a_terminal("ratelimits_verify")) == {"ledger lines", "totals", "report lines"}
    manifest = tmp_path / "manifest.json"
    in_manifest = stages(on_a_terminal("ratelimits_manifest", "2025-01", output=manifest))
    assert in_manifest == {"totals of reports", "edits", "batches"}
    assert stages(on_a_terminal("ratelimits_verify", manifest=[manifest])) > {"totals of reports", "edits"}
    assert stages(on_a_terminal("ratelimits_archive", str(tmp_path), before="2025-02")) == {"shards"}
    assert stages(on_a_terminal("ratelimits_archive", str(tmp_path), restore=True)) == {"archives"}
    rule, trace = tmp_path / "rule.json", tmp_path / "trace.jsonl"
    rule.write_text(json.dumps({"algorithm": "fixed_window", "capacity": 1, "period": 60}))
    trace.write_text('{"at": 1}\n{"at": 2}\n')
    rules = tmp_path / "rules.json"
    rules.write_text(to_text(dump("default")))
    assert stages(on_a_terminal("ratelimits_rules", "diff", str(rules))) == {"rules"}
    assert stages(on_a_terminal("ratelimits_rules", "load", str(rules))) == {"rules"}
    Rule.objects.all()._raw_delete("default")
    assert stages(on_a_terminal("ratelimits_reload")) == {"deleted rules"}
    assert "2/2" in on_a_terminal("ratelimits_simulate", rule=str(rule), trace=str(trace), summary=True)
