"""Test the HTTP headers and bodies that are made from decisions."""

from __future__ import annotations

import pytest

from ratelimits.answers import headers
from ratelimits.answers.headers import Policy
from tests.support.engine.asking import SECOND, ask, limit


@pytest.mark.parametrize(
    ("algorithm", "numbers", "policy"),
    [
        ("fixed_window", {"capacity": 100, "period": 60}, Policy("burst", 100, 60)),
        ("fixed_window", {"capacity": 100, "period": "0.25"}, Policy("burst", 100, 1)),
        ("sliding_window", {"capacity": 100, "period": 90}, Policy("burst", 100, 90)),
        ("token_bucket", {"capacity": 10, "rate": 3, "period": 7}, Policy("burst", 10, 24)),
        ("calendar_window", {"capacity": 10, "calendar_unit": "day"}, Policy("burst", 10, 86_400)),
        ("calendar_window", {"capacity": 10, "calendar_unit": "month"}, Policy("burst", 10, None)),
        ("concurrency", {"capacity": 10}, Policy("burst", 10, None)),
        ("smooth_bursty", {"rate": "0.5", "period": 60, "capacity": None}, Policy("burst", 1, 120)),
        ("leaky_bucket_queue", {"capacity": 1, "rate": 5}, Policy("burst", 2, 1)),
        ("leaky_bucket_queue", {"capacity": 0, "rate": 5}, Policy("burst", 0, None)),
        ("token_bucket", {"capacity": 0}, Policy("burst", 0, None)),
        ("fixed_window", {"capacity": 0, "period": 60}, Policy("burst", 0, None)),
    ],
)
def test_a_policy_is_a_quota_and_the_time_in_which_all_of_it_comes_back(
    algorithm: str, numbers: dict[str, object], policy: Policy
) -> None:
    assert headers.policy("burst", limit(algorithm, **numbers).algorithm) == policy  # type: ignore[arg-type]


def test_the_policies_are_a_list_of_items_with_parameters() -> None:
    assert headers.policies([Policy("burst", 100, 60), Policy("month", 10_000, None)]) == (
        '"burst";q=100;w=60, "month";q=10000'
    )
    assert headers.policies([]) == ""


@pytest.mark.parametrize(
    ("name", "item"),
    [
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("plain", '"plain"'),
        ("two\r\nlines", '"two%0D%0Alines"'),
        ("büro\x7f", '"b%C3%BCro%7F"'),
        ("half\ud800", '"half%3F"'),
    ],
)
def test_a_name_is_a_quoted_string(name: str, item: str) -> None:
    assert headers.ratelimit_field(headers.quoted(name), 5, 1.0) == f"{item};r=5;t=1"


@pytest.mark.parametrize(
    ("seconds", "t", "retry"), [(0, 0, 1), (0.000001, 1, 1), (1, 1, 1), (29.5, 30, 30), (60.0, 60, 60)]
)
def test_times_are_whole_seconds_rounded_up_and_retry_after_is_never_earlier(
    seconds: float, t: int, retry: int
) -> None:
    assert headers.ratelimit_field(headers.quoted("burst"), 0, seconds) == f'"burst";r=0;t={t}'
    assert headers.retry_after(seconds) == str(retry)
    assert retry >= t


@pytest.mark.parametrize(
    ("limit_shown", "text"),
    [(10, "10"), (1_000_000, "1000000"), (1_234_567, "1234567"), (10**12, "1000000000000"), (0.5, "0.5")],
)
def test_the_fields_that_many_clients_know_are_written_out(limit_shown: float, text: str) -> None:
    assert headers.x_ratelimit_fields(limit_shown, 7, 29.5) == {
        "X-RateLimit-Limit": text,
        "X-RateLimit-Remaining": "7",
        "X-RateLimit-Reset": "30",
    }


def test_a_refusal_is_a_problem_document() -> None:
    assert headers.problem(["burst"], 12.3) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": "Try again in 13 seconds.",
        "violated-policies": ["burst"],
    }
    assert headers.problem([], None)["detail"] == "This request can never be admitted."
    assert headers.unavailable()["status"] == 503


@pytest.mark.usefixtures("redis_client")
def test_the_time_belongs_to_the_limit_that_is_shown() -> None:
    minute = limit("fixed_window", name="minute", capacity=3, period=60)
    day = limit("fixed_window", name="day", capacity=1000, period=86_400)
    for limits in ((minute, day), (day, minute)):
        decision = ask(*limits, now=600 * SECOND)
        assert decision.binding is not None
        name = decision.program.terms[decision.binding].name
        fields = headers.fields(decision, "", headers.quoted(name), allowed=True, retry_after=None)
        assert fields["RateLimit"] == f'"minute";r={decision.remaining};t=60'
