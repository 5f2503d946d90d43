"""Test that headers and `/usage/` show a limit per billing period in the period of the account's bill."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.test import Client

from ratelimits.models import Account, Plan, PlanInclusion
from tests.support.rows import rule
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)

TENTH = "2024-01-10T00:00"
TERMS: list[dict[str, Any]] = [
    {},
    {"timezone": "Asia/Tokyo"},
    {"billing_anchor": TENTH},
    {"timezone": "America/New_York", "billing_anchor": TENTH},
]


def per_period(capacity: int = 10, **fields: Any) -> None:
    rule(
        "per-period",
        "calendar_window",
        **{"capacity": capacity, "calendar_unit": "billing_period", "key_kind": "account", "bills": True, **fields},
    )


def span_of_period(timezone: str = "UTC", billing_anchor: str = "") -> tuple[datetime, datetime]:
    """Return the start and the end of the present billing period. Its anchor is the first or the tenth, at midnight."""
    now = datetime.now(ZoneInfo(timezone))
    day = 10 if billing_anchor else 1
    months = 12 * now.year + now.month - 1 - (now.day < day)
    start, end = (now.replace(year=of // 12, month=of % 12 + 1, day=day) for of in (months, months + 1))
    midnight: dict[str, Any] = {"hour": 0, "minute": 0, "second": 0, "microsecond": 0, "fold": 0}
    return start.replace(**midnight), end.replace(**midnight)


def usage(client: Client, **parameters: Any) -> dict[str, Any]:
    response = client.get("/usage/", parameters)
    assert response.status_code == 200, response.content
    answer: dict[str, Any] = response.json()
    return answer


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def limit_of(answer: dict[str, Any], before: float) -> tuple[int, bool]:
    """Return the remaining permits of the only limit, and whether it starts again when the period of the bill ends."""
    (limit,) = answer["quota"]["limits"]
    end = moment(answer["quota"]["period_end"]).timestamp()
    return limit["remaining"], end - time.time() - 0.01 <= limit["reset_after"] <= end - before + 0.01


@pytest.mark.parametrize("terms", TERMS)
def test_the_answer_shows_the_limit_in_the_period_of_the_bill(
    customer: Callable[..., Client], staff: Client, terms: dict[str, Any]
) -> None:
    per_period()
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=5)
    client, before = customer(plan=plan, **terms), time.time()
    for _request in range(3):
        assert client.get("/api/time/").status_code == 200
    for answer in (usage(client), usage(staff, account="acme")):
        assert limit_of(answer, before) == (7, True)
        quota = answer["quota"]
        assert (moment(quota["period_start"]), moment(quota["period_end"])) == span_of_period(**terms)
    flow()
    answer = usage(client, window="period")
    (row,) = answer["results"]
    assert (row["start"], row["end"]) == (answer["quota"]["period_start"], answer["quota"]["period_end"])
    # Both numbers are of one period, so they say the same: the ledger has what the limit has counted.
    assert row["admitted_units"] == answer["quota"]["included"][0]["used"] == 10 - limit_of(answer, before)[0] == 3


@pytest.mark.parametrize("terms", TERMS)
def test_headers_say_when_the_period_of_the_bill_ends(customer: Callable[..., Client], terms: dict[str, Any]) -> None:
    per_period(2)
    client, before = customer(**terms), time.time()
    responses = [client.get("/api/time/") for _ in range(3)]
    end = span_of_period(**terms)[1].timestamp()
    assert [response.status_code for response in responses] == [200, 200, 429]
    for response, left in zip(responses, (1, 0, 0), strict=True):
        assert response["RateLimit-Policy"] == '"per-period";q=2'
        name, remaining, seconds = response["RateLimit"].split(";")
        assert (name, remaining) == ('"per-period"', f"r={left}")
        assert end - time.time() <= int(seconds.removeprefix("t=")) <= end - before + 1
    assert end - time.time() <= int(responses[2]["Retry-After"]) <= end - before + 1


def test_edited_terms_are_shown_by_the_limit_and_the_bill_alike(customer: Callable[..., Client]) -> None:
    per_period()
    client, before = customer(), time.time()
    assert client.get("/api/time/").status_code == 200
    shown = []
    for used_already in (False, True):
        if used_already:
            flow()  # From now on, an edit keeps the present period.
        for terms in ({"timezone": "Asia/Tokyo"}, {"billing_anchor": TENTH}, {"timezone": "UTC", "billing_anchor": ""}):
            Account.objects.filter(identifier="acme").update(**terms)
            answer = usage(client)
            assert limit_of(answer, before) == (9, True)
            shown.append((answer["quota"]["period_start"], answer["quota"]["period_end"]))
    assert len(set(shown[:3])) == 3
    assert len(set(shown[3:])) == 1


def test_a_caller_without_an_account_has_the_months_of_utc(customer: Callable[..., Client], settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ONE_ACCOUNT_PER_KEY": True}
    per_period(2, key_kind="caller", bills=False)
    client, before = customer(None), time.time()
    response = client.get("/api/time/")
    end = span_of_period()[1].timestamp()
    assert end - time.time() <= int(response["RateLimit"].rpartition("t=")[2]) <= end - before + 1
