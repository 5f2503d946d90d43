"""Provide the real scripts with the interface of the model, complete or with lines replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratelimits.engine import assemble
from ratelimits.engine.assemble import general, scripts
from ratelimits.engine.assemble.algorithm_files import algorithm_file
from ratelimits.engine.program import program
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate import sandbox
from tests.support.engine.guards import Edit
from tests.support.engine.replaying import EngineReplay, opening
from tests.support.servers import TestServers

LUA = Path(scripts.__file__).parents[2] / "lua"


@pytest.fixture(scope="module")
def wire(servers: TestServers) -> Iterator[Wire]:
    with sandbox(servers.redis.url) as wire:
        yield wire


@pytest.fixture
def open_replay(wire: Wire) -> Iterator[Callable[[Any], EngineReplay]]:
    with opening(wire) as open_replay:
        yield open_replay


@pytest.fixture
def take_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replace lines of the scripts until the test ends; each must occur exactly once in its file."""

    def forget() -> None:
        for known in (scripts.read, scripts._file, program, assemble.assembled, general.made, algorithm_file):
            known.cache_clear()

    def take_out(*edits: Edit) -> None:
        for file in LUA.rglob("*.lua"):
            text = file.read_text()
            for name, line, instead in edits:
                if file.stem == name:
                    assert text.count(line) == 1, f"not once in {file.name}: {line}"
                    text = text.replace(line, instead)
            copy = tmp_path / file.relative_to(LUA)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(text)
        monkeypatch.setattr(scripts, "_DIRECTORY", tmp_path)
        forget()

    yield take_out
    monkeypatch.undo()
    forget()
