"""The traps of DESIGN §3 on the real scripts; and each springs when the line that it guards is taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ratelimits.engine import Stale, algorithm_from_json, scripts
from ratelimits.engine.program import program
from ratelimits.engine.wire import Wire
from ratelimits.simulate import sandbox
from tests.engine.expiring import ExpiringReplay
from tests.engine.guards import Edit, guarded_by
from tests.engine.replaying import opening
from tests.servers import TestServers
from tests.traces.traps import DEBT, TRAPS, Trap

LUA = Path(scripts.__file__).parents[1] / "lua"


@pytest.fixture(scope="module")
def wire(servers: TestServers) -> Iterator[Wire]:
    with sandbox(servers.redis.url) as wire:
        yield wire


@pytest.fixture
def open_replay(wire: Wire) -> Iterator[Callable[[Any], Any]]:
    with opening(wire) as open_replay:
        yield open_replay


@pytest.fixture
def take_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Edit], None]]:
    """The scripts without a line, until the test ends; the short way, which is another's, is not taken meanwhile."""

    def forget() -> None:
        for known in (scripts.read, scripts.deciding, program):
            known.cache_clear()

    def take_out(edit: Edit) -> None:
        name, line, instead = edit
        for file in LUA.glob("*.lua"):
            text = file.read_text().replace("if ARGV[5] ~= '' then", "if false then")
            if file.stem == name:
                assert text.count(line) == 1, f"the line that this trap guards is no longer in {file.name}"
                text = text.replace(line, instead)
            (tmp_path / file.name).write_text(text)
        monkeypatch.setattr(scripts, "_DIRECTORY", tmp_path)
        forget()

    yield take_out
    monkeypatch.undo()
    forget()


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
def test_it_springs_when_its_line_is_taken_out(trap: Trap, open_replay: Any, take_out: Callable[[Edit], None]) -> None:
    take_out(edit_of(trap))
    with pytest.raises((AssertionError, ResponseError, Stale)):
        trap.play(ExpiringReplay if trap.source == DEBT else open_replay)
