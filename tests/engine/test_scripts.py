"""Test how the scripts are assembled, and that the server accepts them."""

from __future__ import annotations

import hashlib
import re
from itertools import combinations
from pathlib import Path

import pytest
import redis

from ratelimits.algorithms.limits import ALGORITHMS, Gcra, TokenBucket
from ratelimits.engine import scripts
from ratelimits.engine.keys import SHARD_KEYS
from ratelimits.engine.scripts import deciding, read

#: One algorithm for each file.
KINDS = {kind.script: kind for kind in ALGORITHMS.values()}
FILES = sorted(KINDS)
LUA = Path(scripts.__file__).parents[1] / "lua"


def test_every_algorithm_has_its_file() -> None:
    names = {path.name for path in (LUA / "algorithms").iterdir()}
    assert {f"{name}.lua" for name in FILES} <= names


@pytest.mark.parametrize(
    "names", [frozenset(pair) for pair in combinations(FILES, 2)] + [frozenset(), frozenset(FILES)]
)
def test_any_set_of_algorithms_makes_a_script_that_the_server_takes(
    redis_client: redis.Redis, names: frozenset[str]
) -> None:
    script = deciding(frozenset(KINDS[name] for name in names))
    assert redis_client.script_load(script.text) == script.sha.decode() == hashlib.sha1(script.text).hexdigest()


@pytest.mark.parametrize(
    "names", [("publish",), ("batch", "seal"), ("drop",), ("pending",), ("batch", "usage", "count")]
)
def test_every_other_script_is_taken_too(redis_client: redis.Redis, names: tuple[str, ...]) -> None:
    assert redis_client.script_load(read(*names).text)


def test_a_script_is_read_once() -> None:
    assert read("publish") is read("publish")
    assert deciding(frozenset({TokenBucket})) is deciding(frozenset({Gcra}))


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
    whole = [deciding(frozenset(ALGORITHMS.values())), read("run", "batch", "usage", "count"), read("run", "pending")]
    whole += [read("run", "batch", "seal"), read("drop"), read("publish")]
    assert not [script for script in whole if b"${" in re.sub(rb"--.*", b"", script.text)]
