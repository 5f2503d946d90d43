"""Test that the real scripts avoid the traps, and that each trap catches them if the line that avoids it is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ratelimits.engine import Stale, algorithm_from_json
from tests.support.engine.expiring import ExpiringReplay
from tests.support.engine.guards import Edit, guarded_by
from tests.traces.traps import DEBT, TRAPS, Trap


def edit_of(trap: Trap) -> Edit:
    rule = trap.rule[0] if isinstance(trap.rule, list) else trap.rule
    return guarded_by(trap, algorithm_from_json(rule).script)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_trap(trap: Trap, open_replay: Any) -> None:
    trap.play(open_replay)


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap.source == DEBT], ids=lambda trap: trap.name)
def test_trap_where_states_expire(trap: Trap) -> None:
    trap.play(ExpiringReplay)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_it_springs_when_its_line_is_taken_out(trap: Trap, open_replay: Any, take_out: Callable[..., None]) -> None:
    take_out(edit_of(trap))
    with pytest.raises((AssertionError, ResponseError, Stale)):
        trap.play(ExpiringReplay if trap.source == DEBT else open_replay)
