from __future__ import annotations

from decimal import Decimal

import pytest
from django.core.exceptions import ValidationError
from django.db import models

from ratelimits.models import Rule
from ratelimits.models.fields.durations import SecondsField, seconds
from tests.support.rows import unsaved


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("90", "90"),
        (" 0.25 ", "0.25"),
        (".5", "0.5"),
        ("1e3", "1000"),
        ("1 day", "86400"),
        ("1 Day", "86400"),
        ("5 min", "300"),
        ("5m", "300"),
        ("1 m", "60"),
        ("2d", "172800"),
        ("1h", "3600"),
        ("1.5 h", "5400"),
        ("2 weeks", "1209600"),
        ("30s", "30"),
        ("1 day 12 hours", "129600"),
        ("1h30min", "5400"),
        ("-1", "-1"),
    ],
)
def test_what_people_type_is_read_as_seconds(typed: str, read: str) -> None:
    assert seconds(typed) == Decimal(read)


@pytest.mark.parametrize(
    "typed",
    [
        "1 month",
        "1 mo",
        "a day",
        "day",
        "1 day,",
        "1,5 h",
        "1_000",
        "1:30",
        "P1D",
        "1 day 5",
        "-1 day",
        "١ day",
        "1 d/2",
    ],
)
def test_what_could_mean_something_else_is_refused_with_what_to_write(typed: str) -> None:
    with pytest.raises(
        ValidationError, match="write seconds, such as 60, or a number and s, m, min, h, d, day or week"
    ):
        seconds(typed)


def test_a_row_reads_it_wherever_it_is_written() -> None:
    row = unsaved(period="1 day")
    row.clean_fields()
    assert row.period == 86_400


def test_every_length_of_time_is_read_so_and_no_other_number() -> None:
    read = {field.name for field in Rule._meta.concrete_fields if isinstance(field, SecondsField)}
    assert read == {"period", "max_burst_seconds", "warm_up", "lease_ttl", "max_wait"}
    others = {field.name for field in Rule._meta.concrete_fields if isinstance(field, models.DecimalField)} - read
    assert others == {"rate", "cold_factor"}
