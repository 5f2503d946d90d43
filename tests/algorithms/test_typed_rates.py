"""Test the parser of rates as people type them. Lengths of time: tests/models/fields/test_durations.py."""

from __future__ import annotations

import time
from contextlib import suppress
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimits.algorithms.typed_numbers import Mistyped
from ratelimits.algorithms.typed_rates import is_rate, length_and_unit, rate, seconds


@pytest.mark.parametrize(
    ("typed", "permits", "period"),
    [
        ("10/5min", "10", 300),
        ("10 / 5 min", "10", 300),
        ("5/s", "5", 1),
        ("100 per hour", "100", 3_600),
        ("100/day", "100", 86_400),
        ("0.5/second", "0.5", 1),
        ("1000/1 day 12 h", "1000", 129_600),
        ("7 Per Week", "7", 604_800),
        ("0/s", "0", 1),
        ("50 a minute", "50", 60),
        ("50 an hour", "50", 3_600),
        ("50 requests per minute", "50", 60),
        ("50 requests/minute", "50", 60),
        ("3 times each day", "3", 86_400),
        ("1000 Tokens every 5 minutes", "1000", 300),
        ("20 in 10 s", "20", 10),
        # As Django REST framework reads the first letter of a unit.
        ("10/m", "10", 60),
        ("10/h", "10", 3_600),
        ("10/d", "10", 86_400),
        ("10/5m", "10", 300),
        ("10 per 1 h 5 m", "10", 3_900),
        ("50 a m", "50", 60),
        ("10/week", "10", 604_800),
    ],
)
def test_a_rate_is_read(typed: str, permits: str, period: int) -> None:
    assert is_rate(typed)
    assert rate(typed) == (Decimal(permits), Decimal(period))


@pytest.mark.parametrize(
    "typed",
    [
        "10/60",
        "10",
        "/s",
        "10/",
        "ten/s",
        "10/5",
        "10//s",
        "10/s/s",
        "per",
        "10/5min.",
        "a minute",
        "5 min a",
    ],
)
def test_what_could_mean_something_else_is_refused_with_what_to_write(typed: str) -> None:
    with pytest.raises(Mistyped, match="such as 10/s, 10/m or 10/min, 10/h, 10/d, 10/week or 10/5min") as caught:
        rate(typed)
    assert str(caught.value) == caught.value.template % {"text": typed}


@pytest.mark.parametrize("typed", ["1.000/min", "1,000/min", "10/1.000 s"])
def test_what_can_be_a_thousand_is_never_read_as_one(typed: str) -> None:
    with pytest.raises(Mistyped, match="can mean 1 or 1000"):
        rate(typed)


@pytest.mark.parametrize("typed", ["100000/month", "5 per year", "5/2 months"])
def test_a_period_of_no_fixed_length_is_answered_with_the_calendar_window(typed: str) -> None:
    with pytest.raises(Mistyped, match="Choose the algorithm calendar window"):
        rate(typed)


@pytest.mark.parametrize("text", ["10", "5 min", "", "permits"])
def test_other_texts_are_not_taken_for_a_rate(text: str) -> None:
    assert not is_rate(text)


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        ("1", ("1", "s")),
        ("90", ("90", "s")),
        ("300", ("5", "min")),
        ("7200", ("2", "h")),
        ("604800", ("1", "week")),
        ("1209600", ("14", "day")),
        ("0.000001", ("0.000001", "s")),
        ("0", ("0", "s")),
    ],
)
def test_a_length_is_shown_in_its_greatest_unit(length: str, shown: tuple[str, str]) -> None:
    assert length_and_unit(Decimal(length)) == shown


@given(st.decimals(0, 10**9, places=6))
def test_what_is_shown_is_read_as_the_same_length(length: Decimal) -> None:
    assert seconds(" ".join(length_and_unit(length))) == length


@pytest.mark.parametrize(
    "text", ["1d" * 36, "1" * 72, "1 d " * 25, "9" * 8_000, "1 " * 4_000, " " * 8_000, "1/" + "1s" * 4_000]
)
def test_a_long_text_is_refused_at_once(text: str) -> None:
    # `re` let a text of 72 characters stop the process for years.
    for read in (seconds, rate):
        began = time.thread_time()
        with suppress(Mistyped):
            read(text)
        assert time.thread_time() - began < 0.05
    with pytest.raises(Mistyped) as refused:
        seconds(f"{text}x" * 100)
    assert len(str(refused.value)) < 300


def test_a_length_of_time_has_at_most_100_characters() -> None:
    assert seconds("1s " * 33) == 33
    with pytest.raises(Mistyped):
        seconds("1s " * 34)
