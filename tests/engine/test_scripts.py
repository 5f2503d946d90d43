"""Test how the scripts are assembled, and that the server accepts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.scripts import read
from ratelimits.engine.keys import SHARD_KEYS

#: One algorithm for each file.
KINDS = {kind.script: kind for kind in ALGORITHMS.values()}
FILES = sorted(KINDS)
LUA = Path(scripts.__file__).parents[2] / "lua"


COUNTING = ("run", "batch", "counting/shard_run", "counting/usage", "counting/usage_new")
SPENT = (*COUNTING, "counting/spent")


def test_every_algorithm_has_its_file() -> None:
    names = {path.name for path in (LUA / "algorithms").iterdir()}
    assert {f"{name}.lua" for name in FILES} <= names


@pytest.mark.parametrize(
    "names",
    [
        ("memory/full", "publish"),
        ("memory/full", "run", "batch", "seal"),
        ("drop",),
        ("pending",),
        (*COUNTING, "counting/count"),
        SPENT,
    ],
)
def test_every_other_script_is_taken_too(redis_client: redis.Redis, names: tuple[str, ...]) -> None:
    assert redis_client.script_load(read(*names).text)


def test_a_script_is_read_once() -> None:
    assert read("publish") is read("publish")


@pytest.mark.parametrize("name", sorted(str(path.relative_to(LUA)) for path in LUA.rglob("*.lua")))
def test_a_file_says_what_it_is_and_makes_no_text_of_numbers_by_itself(name: str) -> None:
    text = (LUA / name).read_text()
    assert text.startswith("-- ")
    # tostring and cjson write fourteen digits, fewer than a time in microseconds has.
    assert "tostring" not in text
    assert "cjson" not in text


@pytest.mark.parametrize("name", sorted(str(path.relative_to(LUA)) for path in LUA.rglob("*.lua")))
def test_a_file_spells_no_part_of_a_key(name: str) -> None:
    """engine/keys.py and the algorithms name them once; a file of Lua only says which it means."""
    code = re.sub(r"--.*", "", (LUA / name).read_text())
    endings = {ending for kind in ALGORITHMS.values() for ending in kind.storage.endings.values()}
    owns = {f"{kind.storage.own}:" for kind in ALGORITHMS.values() if kind.storage.own}
    parts = {*SHARD_KEYS.values(), *endings, *owns, "s:", "r:", "rl:", "fence"}
    assert not parts & set(re.findall(r"'([^']*)'", code))
    # Nor does it rely on how long a name is.
    assert not re.search(r"string\.sub\(\w*KEYS?\b[^)]*-\d+\)|string\.sub\([\w.]*open, 1, -\d\)", code)


def test_whole_scripts_have_no_placeholder_left() -> None:
    whole = [read(*COUNTING, "counting/count"), read(*SPENT), read("run", "pending")]
    whole += [read("memory/full", "run", "batch", "seal"), read("drop"), read("memory/full", "publish")]
    assert not [script for script in whole if b"${" in re.sub(rb"--.*", b"", script.text)]
