"""Test that scripts and model agree on every one of more than a million decisions, on this session's server."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_million_decisions_agree() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.long.agree"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
