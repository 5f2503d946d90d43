from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits.models import ConfigVersion
from ratelimits.usage.customers.move import move
from ratelimits.usage.models import ShardState
from tests.support.customers import present
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

NOVEMBER = {"from": "2026-11-01", "to": "2026-12-01"}


def spend(moment: str, account: str = "acme", key: str = "api_key:1", cost: int = 1, **about: Any) -> None:
    use(account, key, cost=cost, now=at(moment), configuration=ConfigVersion.read("default")[0], **about)


def ask(client: Client, **parameters: Any) -> dict[str, Any]:
    response = client.get("/usage/", {**NOVEMBER, **parameters})
    assert response.status_code == 200, response.content
    answer: dict[str, Any] = response.json()
    return answer


def short(answer: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(row["start"], row["key"], row["admitted_units"]) for row in answer["results"]]


def test_usage_is_added_up_by_day_key_and_meter(customer: Callable[..., Client]) -> None:
    client = customer()
    spend("2026-11-02T08:00", cost=3)
    spend("2026-11-02T23:59", cost=4)
    spend("2026-11-02T23:59", meter="tokens", cost=250)
    spend("2026-11-02T10:00", key="api_key:2")
    spend("2026-11-03T00:00", capacity=1)
    spend("2026-11-03T00:01", capacity=1)
    flow()
    answer = ask(client)
    assert (answer["account"], answer["window"], answer["timezone"]) == ("acme", "day", "UTC")
    assert (answer["from"], answer["to"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert answer["results"][0] == {
        "start": "2026-11-02T00:00:00Z",
        "end": "2026-11-03T00:00:00Z",
        "account": "acme",
        "key": "api_key:1",
        "meter": "requests",
        "unit": "requests",
        "admitted_requests": 2,
        "admitted_units": 7,
        "denied_requests": 0,
        "denied_units": 0,
        "refunded_units": 0,
    }
    assert [(row["key"], row["meter"], row["admitted_units"], row["denied_requests"]) for row in answer["results"]] == [
        ("api_key:1", "requests", 7, 0),
        ("api_key:1", "tokens", 250, 0),
        ("api_key:2", "requests", 1, 0),
        ("api_key:1", "requests", 1, 1),
    ]


@pytest.mark.parametrize(
    ("window", "starts"),
    [
        ("15m", ["2026-11-02T08:00:00Z", "2026-11-02T08:15:00Z", "2026-11-02T09:00:00Z", "2026-11-03T00:00:00Z"]),
        ("hour", ["2026-11-02T08:00:00Z", "2026-11-02T09:00:00Z", "2026-11-03T00:00:00Z"]),
        ("day", ["2026-11-02T00:00:00Z", "2026-11-03T00:00:00Z"]),
        ("period", ["2026-11-01T00:00:00Z"]),
    ],
)
def test_windows(window: str, starts: list[str], customer: Callable[..., Client]) -> None:
    client = customer()
    for moment in ("2026-11-02T08:14", "2026-11-02T08:15", "2026-11-02T09:00", "2026-11-03T00:00"):
        spend(moment)
    spend("2026-10-31T23:59")
    spend("2026-12-01T00:00")
    flow()
    found = short(ask(client, window=window))
    assert [start for start, _key, _units in found] == starts
    assert sum(units for _start, _key, units in found) == 4


def test_days_are_those_of_the_account_s_clocks_also_when_they_change(customer: Callable[..., Client]) -> None:
    client = customer(timezone="Europe/Berlin")
    # Summer time ends on 25 October 2026 at 3:00: that day has 25 hours.
    for moment in ("2026-10-24T21:59", "2026-10-24T22:00", "2026-10-25T22:59", "2026-10-25T23:00"):
        spend(moment)
    flow()
    answer = ask(client, **{"from": "2026-10-20", "to": "2026-10-30"})
    assert answer["from"] == "2026-10-19T22:00:00Z"
    assert [(row["start"], row["end"], row["admitted_units"]) for row in answer["results"]] == [
        ("2026-10-23T22:00:00Z", "2026-10-24T22:00:00Z", 1),
        ("2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z", 2),
        ("2026-10-25T23:00:00Z", "2026-10-26T23:00:00Z", 1),
    ]
    hours = [
        row["start"] for row in ask(client, window="hour", **{"from": "2026-10-20", "to": "2026-10-30"})["results"]
    ]
    assert hours == ["2026-10-24T21:00:00Z", "2026-10-24T22:00:00Z", "2026-10-25T22:00:00Z", "2026-10-25T23:00:00Z"]


def test_hours_are_those_of_the_time_zone_asked_for(customer: Callable[..., Client]) -> None:
    client = customer()
    spend("2026-11-02T08:15")
    spend("2026-11-02T08:30")
    flow()
    answer = ask(client, window="hour", timezone="Asia/Kolkata")
    assert short(answer) == [("2026-11-02T07:30:00Z", "api_key:1", 1), ("2026-11-02T08:30:00Z", "api_key:1", 1)]


def test_the_hour_that_comes_twice_is_two_hours(customer: Callable[..., Client]) -> None:
    client = customer(timezone="America/New_York")
    spend("2026-11-01T05:30")
    spend("2026-11-01T06:30")
    flow()
    assert short(ask(client, window="hour")) == [
        ("2026-11-01T05:00:00Z", "api_key:1", 1),
        ("2026-11-01T06:00:00Z", "api_key:1", 1),
    ]


def test_periods_are_those_that_the_usage_was_counted_in(customer: Callable[..., Client]) -> None:
    anchor = "2026-01-31T06:00"
    client = customer(billing_anchor=anchor)
    for moment in ("2026-09-30T05:59", "2026-09-30T06:00", "2026-10-31T06:00"):
        spend(moment)
    flow()
    answer = ask(client, window="period", **{"from": "2026-09-15", "to": "2026-10-31T07:00"})
    assert [(row["start"], row["end"]) for row in answer["results"]] == [
        ("2026-08-31T06:00:00Z", "2026-09-30T06:00:00Z"),
        ("2026-09-30T06:00:00Z", "2026-10-31T06:00:00Z"),
        ("2026-10-31T06:00:00Z", "2026-11-30T06:00:00Z"),
    ]
    assert (answer["from"], answer["to"]) == ("2026-08-31T06:00:00Z", "2026-11-30T06:00:00Z")


def test_usage_counted_under_earlier_terms_is_found(customer: Callable[..., Client]) -> None:
    client = customer(billing_anchor="2026-01-17T00:00")
    spend("2026-11-05T12:00")  # while the account had calendar months
    flow()
    assert short(ask(client)) == [("2026-11-05T00:00:00Z", "api_key:1", 1)]


def test_filters_by_key_and_meter(customer: Callable[..., Client]) -> None:
    client = customer()
    spend("2026-11-02T08:00", meter="tokens", cost=9)
    spend("2026-11-02T08:00", key="user:7")
    flow()
    assert short(ask(client, key="user:7")) == [("2026-11-02T00:00:00Z", "user:7", 1)]
    assert short(ask(client, meter="tokens")) == [("2026-11-02T00:00:00Z", "api_key:1", 9)]
    assert short(ask(client, meter="tokens", key="user:7")) == []


def test_pages_follow_each_other_without_gap_or_repetition(customer: Callable[..., Client]) -> None:
    client = customer()
    for day in range(1, 6):
        for number in range(3):
            spend(f"2026-11-0{day}T12:00", key=f"api_key:{number}", cost=day)
    flow()
    whole = short(ask(client))
    assert len(whole) == 15
    page = ask(client, page_size=4)
    assert page["quota"] is not None
    found = short(page)
    while page["next"]:
        page = client.get(page["next"]).json()
        assert page["quota"] is None
        assert (page["from"], page["to"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
        found += short(page)
    assert found == whole


@pytest.mark.parametrize("window", ["15m", "hour", "day", "period"])
def test_pages_of_every_window(window: str, customer: Callable[..., Client]) -> None:
    client = customer(timezone="Asia/Tokyo")
    for number in range(5):
        spend("2026-11-02T08:00", key=f"api_key:{number}")
        spend("2026-11-12T08:00", key=f"api_key:{number}")
    flow()
    page = ask(client, page_size=3, window=window)
    found = short(page)
    while page["next"]:
        page = client.get(page["next"]).json()
        found += short(page)
    assert found == short(ask(client, window=window))
    assert len(found) == (5 if window == "period" else 10)


def test_a_question_costs_few_queries_however_much_there_is(customer: Callable[..., Client]) -> None:
    client = customer()
    for day in range(1, 10):
        for number in range(10):
            spend(f"2026-11-0{day}T12:00", key=f"api_key:{number}")
    flow()
    ask(client)
    for window in ("15m", "hour", "day", "period"):
        with CaptureQueriesContext(
            connection,
        ) as queries:
            ask(client, window=window)
        assert len(queries) <= 11, [query["sql"] for query in queries]


def test_the_answer_says_until_when_it_is_complete(customer: Callable[..., Client]) -> None:
    client = customer()
    assert ask(client)["complete_until"] is None
    spend("2026-11-02T08:00")
    flow()
    ShardState.objects.update(watermark=at("2026-11-02T08:01"))
    assert ask(client)["complete_until"] == "2026-11-02T08:01:00Z"


def test_without_parameters_it_is_the_current_period_by_day(customer: Callable[..., Client]) -> None:
    client = customer()
    use(now=None, configuration=ConfigVersion.read("default")[0])
    flow()
    answer = client.get("/usage/").json()
    assert (answer["window"], [row["admitted_units"] for row in answer["results"]]) == ("day", [1])


@pytest.mark.parametrize(
    ("parameters", "name", "said"),
    [
        ({"window": "week"}, "window", "week"),
        ({"from": "yesterday"}, "from", "format"),
        ({"from": "2026-11-02", "to": "2026-11-02"}, "to", "must be after"),
        ({"from": "0001-01-01"}, "from", "not supported"),
        ({"to": "9999-12-31T23:59:59-12:00"}, "to", "not supported"),
        ({"from": "2020-01-01"}, "from", "400 days"),
        ({"from": "2026-01-01", "window": "15m"}, "from", "32 days"),
        ({"timezone": "Mars/Olympus"}, "timezone", "Europe/Paris"),
        ({"page_size": "0"}, "page_size", "1"),
        ({"page_size": "many"}, "page_size", "integer"),
        ({"cursor": "nonsense"}, "cursor", "next"),
        ({"cursor": "WzFd"}, "cursor", "next"),
        ({"cursor": "W1tbW1tb" * 240}, "cursor", "next"),
        ({"key": "a\0b"}, "key", "ull"),
        ({"acount": "acme"}, "acount", "no such parameter"),
        ({"key": ["a", "b"]}, "key", "more than once"),
        ({"meter": ""}, "meter", "blank"),
    ],
)
def test_a_bad_parameter_is_a_400_that_names_it(
    parameters: dict[str, Any], name: str, said: str, customer: Callable[..., Client]
) -> None:
    response = customer().get("/usage/", parameters)
    assert response.status_code == 400
    assert list(response.json()) == [name]
    assert said in str(response.json()[name])


def test_a_moment_may_have_an_offset(customer: Callable[..., Client]) -> None:
    answer = ask(customer(), window="15m", **{"from": "2026-11-02T08:20:00+01:00", "to": "2026-11-02T09:00:00Z"})
    assert (answer["from"], answer["to"]) == ("2026-11-02T07:15:00Z", "2026-11-02T09:00:00Z")


@pytest.mark.parametrize("account", ["会" * 59, "会" * 64], ids=["59", "64"])
def test_a_customer_with_a_long_name_sees_its_usage(
    account: str, customer: Callable[..., Client], staff: Client
) -> None:
    client = customer(account)
    spend("2026-11-02T08:00", account, cost=3)
    flow()
    assert [row["admitted_units"] for row in ask(client)["results"]] == [3]
    assert [row["admitted_units"] for row in ask(client, account=account)["results"]] == [3]
    assert [row["admitted_units"] for row in ask(staff, account=account)["results"]] == [3]


def test_staff_find_an_account_whose_name_is_longer_than_the_ledgers(staff: Client) -> None:
    spend("2026-11-02T08:00", "x" * 300, cost=3)
    flow()
    assert [row["admitted_units"] for row in ask(staff, account="x" * 300)["results"]] == [3]


@pytest.mark.parametrize("asked", ["x user:5", "=x%20user:5"])
def test_staff_find_an_account_by_its_text_and_by_its_name(asked: str, staff: Client) -> None:
    spend("2026-11-02T08:00", "=x%20user:5", cost=3)
    flow()
    assert [row["admitted_units"] for row in ask(staff, account=asked)["results"]] == [3]


def test_a_customer_sees_its_own_usage_under_all_its_names_and_a_successor_sees_nothing_of_before(
    customer: Callable[..., Client],
) -> None:
    client = customer("a")
    one = present("default", ["a"])["a"]
    spend("2026-11-02T08:00", "a", cost=3)
    move("x", one, at("2026-11-02T09:00") // 10**6)
    spend("2026-11-02T09:00", "x", cost=4)
    spend("2026-11-02T08:00", "x", key="api_key:9", cost=50)  # by whoever had the text before
    flow()
    assert [(row["account"], row["admitted_units"]) for row in ask(client)["results"]] == [("a", 3), ("x", 4)]
    move("a", None, at("2026-11-02T10:00") // 10**6)
    spend("2026-11-02T10:00", "a", cost=5)
    flow()
    assert [(row["account"], row["admitted_units"]) for row in ask(client)["results"]] == [("a", 5)]
    renamed = customer("x")
    assert [(row["account"], row["admitted_units"]) for row in ask(renamed)["results"]] == [("a", 3), ("x", 4)]


def test_staff_see_two_customers_of_one_text_apart_by_their_tokens(staff: Client) -> None:
    spend("2026-11-02T08:00", "a", cost=3)
    flow()
    one = present("default", ["a"])["a"]
    move("a", None, at("2026-11-02T10:00") // 10**6)
    spend("2026-11-02T10:00", "a", cost=5)
    flow()
    two = present("default", ["a"])["a"]

    def found(**about: str) -> tuple[Any, list[tuple[str, int]]]:
        answer = ask(staff, window="period", **about)
        return answer["account"], [(row["account"], row["admitted_units"]) for row in answer["results"]]

    assert found() == (None, [("a", 8)])
    assert found(account=two.token) == found(account="a") == ("a", [("a", 5)])
    waiting = f"=~{one.token}"
    assert found(account=one.token) == found(account=waiting) == (waiting, [("a", 3)])
    assert ask(staff, account=one.token)["complete_until"] == ask(staff, account="a")["complete_until"] is not None
    move("x", one, at("2026-11-02T11:00") // 10**6)
    assert found(account=one.token) == ("x", [("a", 3)])
    assert found(account="nobody") == ("nobody", [])


def test_a_customer_cannot_ask_by_a_token(customer: Callable[..., Client]) -> None:
    client = customer()
    spend("2026-11-02T08:00", "other")
    flow()
    token = present("default", ["other"])["other"].token
    assert client.get("/usage/", {**NOVEMBER, "account": token}).status_code == 403


def test_the_quota_of_a_successor_begins_with_nothing_used(customer: Callable[..., Client]) -> None:
    client, now = customer("a"), time.time_ns() // 1000
    use("a", cost=3, now=now, configuration=ConfigVersion.read("default")[0])
    flow()

    def used() -> list[int]:
        return [meter["used"] for meter in ask(client)["quota"]["included"]]

    assert used() == [3]
    move("a")
    assert used() == []
