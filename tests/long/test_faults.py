"""Test that the list of mistakes fits the code, and that a mistake is planted in a copy and taken out again."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long.faults import planted
from tests.long.mistakes import FAULTS
from tests.long.mistakes_in_bills import IN_BILLS
from tests.long.planting import ROOT, changed


def test_each_mistake_can_be_planted_and_compiles() -> None:
    wrong = []
    for fault in (*FAULTS, *IN_BILLS):
        source = (ROOT / "ratelimits" / fault.file).read_text()
        try:
            source = changed(source, fault.text, fault.instead, fault.file)
            if fault.file.endswith(".py"):
                ast.parse(source)
        except (AssertionError, SyntaxError) as error:
            wrong.append(str(error))
    assert wrong == []


def test_there_are_mistakes_in_almost_every_room_and_their_tests_exist() -> None:
    assert len(FAULTS) == 40
    assert len({fault.room for fault in FAULTS}) >= 30
    assert [fault.tests for fault in (*FAULTS, *IN_BILLS) if not (ROOT / "tests" / fault.tests).exists()] == []


def test_a_copy_has_a_mistake_only_for_a_while(tmp_path: Path) -> None:
    fault = FAULTS[0]
    right = (ROOT / "ratelimits" / fault.file).read_text()
    path = tmp_path / "ratelimits" / fault.file
    path.parent.mkdir()
    path.write_text(right)
    with planted(fault, tmp_path):
        assert fault.instead in path.read_text() != right
    assert path.read_text() == right


@pytest.mark.long
def test_the_quick_tests_find_most_of_them_and_the_complete_tests_all() -> None:
    command = [sys.executable, "-m", "tests.long.faults", "--complete"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
