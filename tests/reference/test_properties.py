"""Test that the model keeps its promises: it judges the engine, so it must be judged too."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import Replay
from tests.traces import properties
from tests.traces.strategies import ALGORITHMS, rules, steady_lines

brief = settings(max_examples=20)
SLIDING_FREELY = ("concurrency", "gcra", "leaky_bucket", "leaky_bucket_queue", "sliding_log", "smooth_bursty")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@brief
@given(data=st.data())
def test_retry_after_is_exact(algorithm: str, data: st.DataObject) -> None:
    rule = data.draw(rules(algorithm))
    lines = data.draw(steady_lines(rule, ("try_acquire", "acquire"), timeouts=True))
    # An acquire has no longest wait, so its retry differs from that of a try.
    lines = [line for line in lines if "timeout" not in line or line["op"] == "try_acquire"]
    tries = [line if line["op"] == "try_acquire" else line | {"op": "acquire", "timeout": 10**8} for line in lines]
    properties.check_retry_after_is_exact(Replay, rule, tries)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@brief
@given(data=st.data())
def test_a_peek_tells_what_a_try_would(algorithm: str, data: st.DataObject) -> None:
    rule = data.draw(rules(algorithm))
    properties.check_peek_tells_what_a_try_would(Replay, rule, data.draw(steady_lines(rule, timeouts=True)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@brief
@given(data=st.data())
def test_refusals_and_peeks_change_nothing(algorithm: str, data: st.DataObject) -> None:
    rule = data.draw(rules(algorithm))
    lines = data.draw(steady_lines(rule, ("try_acquire", "acquire", "peek"), timeouts=True))
    properties.check_refusals_and_peeks_change_nothing(Replay, rule, lines)


@pytest.mark.parametrize("algorithm", SLIDING_FREELY)
@brief
@given(data=st.data())
def test_a_clock_that_was_put_right_keeps_what_is_spent(algorithm: str, data: st.DataObject) -> None:
    rule = data.draw(rules(algorithm))
    lines = data.draw(steady_lines(rule, ("try_acquire", "acquire")))
    span = int(lines[-1]["at"] - lines[0]["at"])
    properties.check_a_jump_keeps_what_is_spent(Replay, rule, lines, span + data.draw(st.integers(62, 10**6)))


@brief
@given(data=st.data())
def test_several_limits_are_all_or_nothing(data: st.DataObject) -> None:
    several = data.draw(st.lists(rules(), min_size=2, max_size=5))
    lines = data.draw(steady_lines(several, ("try_acquire", "acquire", "peek"), timeouts=True))
    properties.check_all_or_nothing(Replay, several, lines)


@brief
@given(data=st.data())
def test_a_level_admits_no_more_than_capacity_and_refill(data: st.DataObject) -> None:
    rule = data.draw(rules("token_bucket", "gcra", "leaky_bucket"))
    taken, _ = properties.admitted(Replay, rule, data.draw(steady_lines(rule)))
    properties.check_level_promise(taken, rule)


@brief
@given(data=st.data())
def test_what_a_level_lends_proceeds_when_it_is_there(data: st.DataObject) -> None:
    rule = data.draw(rules("token_bucket", "gcra"))
    _, proceeding = properties.admitted(Replay, rule, data.draw(steady_lines(rule, ("acquire",))))
    properties.check_level_promise(proceeding, rule)


@brief
@given(data=st.data())
def test_a_sliding_log_never_exceeds_capacity_in_any_interval(data: st.DataObject) -> None:
    rule = data.draw(rules("sliding_log"))
    taken, _ = properties.admitted(Replay, rule, data.draw(steady_lines(rule)))
    assert properties.most_in(taken, Fraction(rule["period"])) <= rule["capacity"]


@brief
@given(data=st.data())
def test_windows_never_exceed_capacity(data: st.DataObject) -> None:
    rule = data.draw(
        rules("fixed_window", "sliding_window").filter(lambda rule: rule.get("window_start") != "first_hit")
    )
    taken, _ = properties.admitted(Replay, rule, data.draw(steady_lines(rule)))
    properties.check_window_promise(taken, rule)


@brief
@given(data=st.data())
def test_a_queue_spaces_what_waits(data: st.DataObject) -> None:
    rule = data.draw(rules("leaky_bucket_queue"))
    _, proceeding = properties.admitted(Replay, rule, data.draw(steady_lines(rule, ("acquire",))))
    properties.check_spacing_promise(proceeding, rule)


@brief
@given(data=st.data())
def test_a_bursty_limiter_gives_no_more_than_was_stored_and_made(data: st.DataObject) -> None:
    rule = data.draw(rules("smooth_bursty"))
    _, proceeding = properties.admitted(Replay, rule, data.draw(steady_lines(rule, ("acquire", "try_acquire"))))
    properties.check_borrowing_promise(proceeding, rule)


@brief
@given(data=st.data())
def test_leases_in_flight_never_exceed_capacity(data: st.DataObject) -> None:
    rule = data.draw(rules("concurrency"))
    taken, _ = properties.admitted(Replay, rule, data.draw(steady_lines(rule)))
    assert properties.most_in(taken, Fraction(rule["lease_ttl"])) <= rule["capacity"]


BAD_LINES: list[tuple[Any, str]] = [
    ({}, "at"),
    ({"at": -1}, "at"),
    ({"at": "1"}, "at"),
    ({"at": True}, "at"),
    ({"at": 1, "op": "take"}, "op"),
    ({"at": 1, "cost": -1}, "cost"),
    ({"at": 1, "cost": Decimal("1.5")}, "cost"),
    ({"at": 1, "key": 7}, "key"),
    ({"at": 1, "timeout": "long"}, "timeout"),
    ({"at": 1, "op": "set_rule"}, "rule"),
    ({"at": 1, "op": "set_rule", "rule": {"algorithm": "token_bucket", "capacity": 1, "rate": 0, "period": 1}}, "rate"),
    ({"at": 1, "op": "set_rule", "rule": []}, "rule"),
    ({"at": 1, "tiemout": 1}, "tiemout"),
    ([], "object"),
]


@pytest.mark.parametrize(("line", "word"), BAD_LINES)
def test_a_bad_line_is_named_and_changes_nothing(line: Any, word: str) -> None:
    replay = Replay({"algorithm": "token_bucket", "capacity": 3, "rate": 1, "period": 1})
    replay.step({"at": 1})
    before = dict(replay.keys)
    with pytest.raises(ValueError, match=word):
        replay.step(line)
    assert replay.keys == before
