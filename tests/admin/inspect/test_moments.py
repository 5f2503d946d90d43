"""Test the moment for which a user asks."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from ratelimits.admin.inspect.moments import NoMomentError, typed_moment

#: The moment at which the user asks.
NOW = datetime(2026, 11, 24, 23, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("12:04", "2026-11-24 12:04"),
        ("23:31", "2026-11-23 23:31"),
        ("12:04+02:00", "2026-11-24 10:04"),
        ("00:30+02:00", "2026-11-24 22:30"),
        ("01:31+02:00", "2026-11-23 23:31"),
        ("18:29-05:00", "2026-11-24 23:29"),
        ("2026-11-20 12:04", "2026-11-20 12:04"),
        ("2026-11-20 12:04+02:00", "2026-11-20 10:04"),
    ],
)
def test_a_text_means_the_last_moment_with_this_time(text: str, moment: str) -> None:
    assert typed_moment(text, NOW) == int(datetime.fromisoformat(f"{moment}+00:00").timestamp())


def test_an_empty_text_is_no_moment() -> None:
    assert typed_moment("", NOW) is None


@pytest.mark.parametrize("text", ["25:00", "yesterday", "9999-12-31 23:59", "0001-01-01", "2026-11-24 23:31"])
def test_another_text_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(NoMomentError, match=f"“{text}” is not a time that has passed. Write 12:04"):
        typed_moment(text, NOW)
