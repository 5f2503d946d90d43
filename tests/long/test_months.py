"""Test that the bills of 2,000 customers over 24 months are those of the model, on this session's kind of database."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.long
def test_the_bills_of_two_thousand_customers_are_those_of_the_model() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.long.months"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
