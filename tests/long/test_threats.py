"""Test that each threat of docs/security.md has a test, and that this test fails without its defence."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.answers.test_headers import test_a_name_is_a_quoted_string as names_are_quoted
from tests.long.planting import ROOT
from tests.long.threats import DEFENCES, Defence, named_on_the_page, taken_out, without
from tests.usage.test_posting import test_an_address_of_a_private_network_is_not_public as private_is_not_public


def shown(defence: Defence) -> str:
    """Return the test of a defence as the page names it: without its class."""
    return re.sub(r"::\w+::", "::", defence.test)


def defence_of(name: str) -> Defence:
    (found,) = [defence for defence in DEFENCES if defence.test.endswith(name)]
    return found


def test_the_page_names_the_test_of_each_defence() -> None:
    assert sorted(named_on_the_page()) == sorted({shown(defence) for defence in DEFENCES})


@pytest.mark.parametrize("defence", DEFENCES, ids=shown)
def test_a_defence_and_its_test_exist(defence: Defence) -> None:
    module, *_classes, name = defence.test.split("::")
    assert f"def {name}(" in (ROOT / module).read_text()
    assert without(defence)


def test_two_of_them_fail_without_their_defences() -> None:
    private_is_not_public("10.1.2.3", False)
    with taken_out(defence_of("test_an_address_of_a_private_network_is_not_public")), pytest.raises(AssertionError):
        private_is_not_public("10.1.2.3", False)
    with taken_out(defence_of("test_a_name_is_a_quoted_string")), pytest.raises(AssertionError):
        names_are_quoted("a\nb", '"a%0Ab"')


@pytest.mark.long
def test_all_of_them_fail_without_their_defences() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.long.threats"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
