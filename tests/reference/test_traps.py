"""Test that the model avoids the traps that it is there to find."""

from __future__ import annotations

import pytest

from tests.reference import Replay
from tests.traces.traps import TRAPS, Trap


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_trap(trap: Trap) -> None:
    trap.play(Replay)
