"""Test the part of a decision that is compiled once."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from ratelimits.algorithms.limits import ALGORITHMS, CalendarWindow
from ratelimits.engine.program import Program, StateKey, Term, program
from tests.support.engine.asking import MONTHS, NOW, limit


def term(algorithm: str, /, key: int = 0, slot: int = 0, **numbers: object) -> Term:
    made = limit(algorithm, **numbers)  # type: ignore[arg-type]
    return Term(made.algorithm, made.name, key, slot)


def test_the_same_terms_are_the_same_program() -> None:
    assert program((term("gcra"),)) is program((term("gcra"),))
    assert program((term("gcra"),)) == Program((term("gcra"),)) != Program((term("gcra", capacity=3),))


@pytest.mark.parametrize("numbers", [{"rule": 2**32}, {"version": 2**32}, {"rule": -1}, {"version": -1}])
def test_a_rule_has_numbers_of_at_most_ten_digits(numbers: dict[str, Any]) -> None:
    largest = replace(term("gcra"), rule=2**32 - 1, version=2**32 - 1)
    assert program((largest,)).packed(NOW).program.endswith(b"4294967295|4294967295\0")
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*32 - 1"):
        program((replace(largest, **numbers),)).packed(NOW)


def test_a_kept_program_is_its_terms() -> None:
    one = program((term("calendar_window"), term("sliding_log", name="log")))
    one.packed(NOW)
    kept = pickle.dumps(one)
    assert pickle.loads(kept) is one
    assert len(kept) < 1000


@pytest.mark.parametrize("other", ["same", "plumless"])
def test_two_limits_of_one_key_are_told_apart_by_name(other: str) -> None:
    # "plumless" and "buckeroo" are the well-known example of two words with the same CRC-32.
    first = "same" if other == "same" else "buckeroo"
    terms = term("gcra", name=first), term("token_bucket", name=other)
    message = (
        "two limits of one key are named 'same': rename one"
        if other == "same"
        else "the names 'buckeroo' and 'plumless' of two limits of one key have the same CRC-32: rename one"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        program(terms)
    assert program((terms[0], replace(terms[1], key=1))) is not None


def test_a_decision_takes_so_many_limits() -> None:
    assert program(tuple(term("gcra", key=number) for number in range(120))) is not None
    with pytest.raises(ValueError, match=r"^a decision takes at most 120 limits, not 121$"):
        program(tuple(term("gcra", key=number) for number in range(121)))


def test_a_key_has_one_packed_state_and_own_ones_where_they_are_needed() -> None:
    one = program(tuple(term(name, name=name, key=number % 2) for number, name in enumerate(ALGORITHMS)))
    packed, own = one.states[: one.packed_states], one.states[one.packed_states :]
    assert packed == (StateKey(0), StateKey(1))
    assert sorted(place.own[0] for place in own if place.own) == ["c", "l", "w"]
    assert program((term("sliding_window"),)).packed_states == 0


def test_without_a_calendar_a_program_is_always_right() -> None:
    one = program((term("gcra"), term("fixed_window", name="window")))
    assert one.packed(0) is one.packed(NOW)
    assert (one.packed(0).start, one.packed(0).end) == (float("-inf"), float("inf"))


def test_with_calendars_it_is_right_until_the_first_of_them_ends() -> None:
    one = program(
        (
            term("calendar_window", name="month"),
            term("calendar_window", name="day", calendar_unit="day"),
            term("gcra", name="other"),
        )
    )
    day = NOW // 86_400_000_000 * 86_400_000_000
    now = one.packed(NOW)
    assert (now.start, now.end) == (day, day + 86_400_000_000)
    assert one.packed(NOW + 1) is now
    last = one.packed(MONTHS[2] - 1)
    assert (last.start, last.end) == (MONTHS[2] - 86_400_000_000, MONTHS[2])
    assert last.program != now.program


def test_a_calendar_is_placed_by_the_moment_that_is_asked_about() -> None:
    algorithm = limit("calendar_window").algorithm
    assert isinstance(algorithm, CalendarWindow)
    assert algorithm.params(NOW)[:4] == MONTHS
