"""Test the assembled scripts: all their forms decide alike, and each line of the buckets and windows is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from random import Random
from typing import Any

import pytest
import redis

from ratelimits.algorithms.limits import ALGORITHMS, Mode
from ratelimits.engine import assemble, decide
from ratelimits.engine.assemble import states
from ratelimits.engine.assemble.algorithm_files import divided, rarely, without_unused
from ratelimits.engine.assemble.scripts import indented
from ratelimits.engine.call import Call, Op
from ratelimits.engine.command import Command
from ratelimits.engine.program import Term, program
from tests.support.engine.asking import KEYS, NOW, SECOND, limit, usage
from tests.support.engine.guards import Edit
from tests.traces.agreement import Disagreement, first_difference
from tests.traces.rules import random_rule
from tests.traces.traffic import traffic

#: The algorithms whose functions are inserted into the script.
INSERTED = ("token_bucket", "leaky_bucket", "gcra", "fixed_window", "calendar_window")
#: What a line avoids -> its file, the line, and the text that replaces it.
LINES: dict[str, Edit] = {
    "a clock that steps back": ("decide", "if l.last > at then l.shift, l.last = l.last - at, at end", ""),
    "a window that has ended": ("window", "not l.start or at >= l.start + l.length", "not l.start"),
    "a window that is full": ("window", "elseif l.count + l.cost <= l.capacity then", "else"),
    "a level that is full": ("level", "    elseif excess <= 0 then", "    else"),
    "a level that has drained": ("level", "    l.T = l.T - elapsed\n  end\nend", "  end\nend"),
    "a fraction that is carried": ("level", "  if g >= l.n * l.m then T, g = T + 1, g - l.n * l.m end\n", ""),
    "a fraction that is borrowed": ("level", "if g < 0 then T, g = T - 1, g + l.n * l.m end", ""),
    "the one with least left": ("decide", "l.remaining < remaining", "l.remaining > remaining"),
    "the longest reset": ("decide", "if l.reset > reset then", "if l.reset < reset then"),
    "a charge of what a sibling refuses": (
        "decide",
        "  if allowed and l.ok then\n--: do charge",
        "  if l.ok then\n--: do charge",
    ),
}
#: The same for cases that no replay has: edited rules, other limits beside them, or different costs.
AMONG_OTHERS: dict[str, Edit] = {
    "another pace": ("level", "if l.stored_q ~= l.q or l.stored_r ~= l.r or l.stored_n ~= l.n then", "if false then"),
    "another period": ("window", "elseif l.length ~= l.period or l.start % l.length ~= 0 then", "elseif false then"),
}


def runs() -> Iterator[tuple[Any, list[Any]]]:
    """Return seeded traces under one, two and three rules."""
    for seed in range(60):
        draw = Random(f"the short way {seed}")
        several = [random_rule(draw, draw.choice(INSERTED)) for _ in range(1 + seed % 3)]
        rule = several if len(several) > 1 else several[0]
        yield rule, list(traffic(draw, rule, 120))


def difference(open_replay: Callable[[Any], Any]) -> Disagreement | None:
    """Return the first difference between the scripts and the model, or None."""
    for rule, pairs in runs():
        lines, answers = [line for line, _ in pairs], [answer for _, answer in pairs]
        found = first_difference(open_replay, rule, lines, answers)
        if found is not None:
            return found
    return None


def test_it_agrees_with_the_model(open_replay: Callable[[Any], Any]) -> None:
    assert difference(open_replay) is None


@pytest.mark.parametrize("line", LINES)
def test_without_one_of_its_lines_it_does_not(
    line: str, open_replay: Callable[[Any], Any], take_out: Callable[..., None]
) -> None:
    take_out(LINES[line])
    assert difference(open_replay) is not None


def edited(draw: Random, key: str) -> list[dict[str, Any]]:
    """Return a few limits of a key, at random: some of the possible ones, with numbers out of a few."""
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "token_bucket": lambda: {"rate": draw.choice([2, 5]), "period": 10},
        "leaky_bucket": lambda: {"rate": draw.choice([2, 3, 7]), "period": 10},
        "fixed_window": lambda: {"period": draw.choice([5, 10])},
        "calendar_window": lambda: {"calendar_unit": draw.choice(["hour", "day"])},
        "sliding_window": lambda: {"period": 10, "sub_windows": draw.choice([1, 5])},
        "sliding_log": lambda: {"period": draw.choice([5, 10])},
        "smooth_bursty": lambda: {"rate": draw.choice([2, 3]), "period": 10},
        "concurrency": lambda: {"lease_ttl": 5},
    }
    chosen = []
    for algorithm in draw.sample(sorted(kinds), draw.randint(1, 4)):
        shadow = {"mode": Mode.SHADOW} if draw.random() < 0.2 else {}
        numbers = {"algorithm": algorithm, "name": algorithm, "key": key, "cost": draw.randint(0, 3)}
        chosen.append({**numbers, **shadow, **kinds[algorithm]()})
    return chosen


def answers(seed: int, key: str) -> list[tuple[int, ...]]:
    """Return the answers to a trace of decisions about a key that was never seen."""
    draw, now, told = Random(seed), NOW, []
    for _ in range(40):
        now += draw.choice([0, 1, SECOND // 3, SECOND, 4 * SECOND, 1800 * SECOND, -SECOND])
        limits = [limit(one.pop("algorithm"), capacity=12, since=now, **one) for one in edited(draw, key)]
        told.append(tuple(decide(limits, now=now, timeout=draw.choice([0, 2])).reply))
    return told


def all_answers(name: str) -> list[list[tuple[int, ...]]]:
    return [answers(seed, f"user:{name}-{seed}") for seed in range(12)]


@cache
def right_answers() -> list[list[tuple[int, ...]]]:
    """Return the answers of the scripts as they are."""
    return all_answers("right")


def test_scripts_with_tables_decide_as_scripts_with_local_variables(
    take_out: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_locals = right_answers()
    monkeypatch.setattr(assemble, "_MAX_LOCALS", 0)
    take_out()
    assert all_answers("tables") == with_locals


def test_the_general_script_decides_as_the_scripts_of_single_shapes(
    take_out: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_shape = right_answers()
    monkeypatch.setattr(assemble, "_MAX_LIMITS", 0)
    take_out()
    assert all_answers("general") == by_shape


def test_a_process_makes_a_bounded_number_of_scripts(
    take_out: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "_MAX_SCRIPTS", 3)
    take_out()
    scripts = {command(*names).script.sha for names in combinations(ALGORITHMS, 2)}
    assert len(scripts) == 4  # three for single shapes, and the general one
    assert command("sliding_log", "gcra").script is command("concurrency", "smooth_bursty").script


def test_a_script_defines_only_functions_that_most_calls_need() -> None:
    def defined(algorithm: str) -> list[str]:
        before, _start, rest = command(algorithm).script.text.decode().partition("\nfunction rarely()\n")
        usual = before + rest[rest.index("\nlocal now, ") :]
        return re.findall(r"^local function (\w+)", usual, re.MULTILINE)

    assert defined("token_bucket") == ["muldiv", "intervals"]
    assert defined("fixed_window") == []
    assert defined("sliding_log") == ["has_keys", "log_functions"]


def test_functions_are_divided_by_how_often_they_are_needed() -> None:
    text = """-- Returns a.
local function a() return 1 end

-- Returns b.
--@rarely
local function b(x)
  if x then return a() end
end

local function c()
  return 3
end
"""
    found = divided(text)
    assert found.usual == "-- Returns a.\nlocal function a() return 1 end\n\n\nlocal function c()\n  return 3\nend\n"
    assert [one.name for one in found.named] == ["a", "c"]
    (b,) = found.rarely
    assert b == ("b", "-- Returns b.\nlocal function b(x)\n  if x then return a() end\nend\n")
    script = "\n".join([found.usual, *rarely(found.rarely), "return a()"])
    left = without_unused(script, [*found.named, *found.rarely])
    assert "local function a()" in left
    assert "local function b(" not in left
    assert "local function c(" not in left
    assert "\nlocal functions = {\n}\n" in left


def test_scripts_are_indented_by_their_blocks() -> None:
    lines = [
        "if a then",
        "do",
        "f({",
        "'end', -- do",
        "})",
        "end",
        "elseif b",
        "or c then",
        "g()",
        "else",
        "h()",
        "end",
    ]
    assert indented("\n".join(lines)).split("\n") == [
        "if a then",
        "  do",
        "    f({",
        "        'end', -- do",
        "    })",
        "  end",
        "elseif b",
        "  or c then",
        "  g()",
        "else",
        "  h()",
        "end",
        "",
    ]


def test_records_in_another_order_decide_alike(take_out: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a common form, each record is searched and written for itself."""
    at_once = right_answers()
    monkeypatch.setattr(states, "common_form", lambda _limits: None)
    take_out()
    assert all_answers("one-by-one") == at_once


@pytest.mark.parametrize("line", AMONG_OTHERS)
def test_without_one_of_its_lines_it_decides_otherwise(line: str, take_out: Callable[..., None]) -> None:
    right = right_answers()
    take_out(AMONG_OTHERS[line])
    assert all_answers("wrong") != right


def command(*algorithms: str, op: Op = Op.TRY, **more: Any) -> Command:
    terms = tuple(Term(limit(name).algorithm, name, 0, 0) for name in algorithms)
    return Command(KEYS, Call(program(terms), ("user:1",), (1,), "acme", op=op, **more))


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.SETTLE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_operation_of_each_algorithm_has_a_script_that_the_server_takes(
    redis_client: redis.Redis, algorithm: str, op: Op
) -> None:
    script = command(algorithm, op=op).script
    assert redis_client.script_load(script.text) == script.sha.decode()
    # No directive and no placeholder is left.
    assert not re.search(rb"^--: ", script.text, re.MULTILINE)
    assert b"${" not in re.sub(rb"--.*", b"", script.text)


def test_a_script_contains_what_its_requests_need_and_nothing_else() -> None:
    text = command("token_bucket").script.text
    assert b"usage_add" not in text
    assert b"ZADD" not in text
    assert b"usage_add" in command("token_bucket", usage=usage()).script.text
    assert b"ZADD" in command("concurrency").script.text


def test_requests_of_one_shape_share_a_script_whatever_their_numbers_are() -> None:
    some, other = limit("gcra", rate=2, capacity=3).algorithm, limit("gcra", rate=5, capacity=70).algorithm
    first, second = (
        Command(KEYS, Call(program((Term(kind, "a", 0, 0),)), (key,), (1,), "acme"))
        for kind, key in ((some, "user:1"), (other, "user:2"))
    )
    assert first.script is second.script
    assert command("gcra").script is not command("gcra", op=Op.PEEK).script
