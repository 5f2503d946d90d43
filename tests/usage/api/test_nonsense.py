"""Test that any query gets a page, a file, or a sentence about what is wrong, never an error of the server."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from urllib.parse import urlencode

import pytest
from django.test import Client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.django_db(transaction=True)

AWKWARD = [
    "",
    "\0",
    "a\0b",
    "²",
    "٢٠٢٦-11",
    "9" * 30,
    "9" * 5000,
    "-1",
    "1e400",
    "NaN",
    "Infinity",
    "\ud800",
    "%ED%A0%80",
    "../../etc/passwd",
    "x" * 300,
    "0001-01-01",
    "9999-12-31",
    "0000-01",
    "0001-01",
    "9999-12",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.999999-23:59",
    "Europe/Berlin\n",
    "[" * 1000,
    "{}",
]
NAMES = ["window", "account", "key", "meter", "timezone", "page_size", "cursor", "from", "to", "format"]
anything = st.sampled_from(AWKWARD) | st.text(max_size=40) | st.integers().map(str) | st.datetimes().map(str)


def cursor_of(value: object) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode()


cursors = st.one_of(
    st.lists(st.integers() | st.floats() | st.text() | st.none() | st.just("\ud800"), max_size=6).map(cursor_of),
    st.binary(max_size=60).map(lambda raw: urlsafe_b64encode(raw).decode()),
)
brief = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def query(parameters: dict[str, str]) -> bytes:
    """Return a query string. Halves of characters are encoded as a careless client would send them."""
    return urlencode({name: value.encode("utf-8", "surrogatepass") for name, value in parameters.items()}).encode()


def asked(client: Client, path: str, parameters: dict[str, str]) -> int:
    status: int = client.get(path, QUERY_STRING=query(parameters).decode()).status_code
    return status


@pytest.mark.parametrize(
    "place",
    [
        [0, "\ud800", "k", "m"],
        [0, "a", "\udfff", "m"],
        [0, "a", "k", "m\ud800"],
        [0, "a\0", "k", "m"],
        [10**30, "a", "k", "m"],
        [True, "a", "k", "m"],
        [0, ["a"], "k", "m"],
        {"0": 1},
        None,
    ],
)
def test_a_cursor_that_no_page_gave_is_refused_with_a_sentence(staff: Client, place: object) -> None:
    response = staff.get("/usage/", {"cursor": cursor_of(place)})
    assert response.status_code == 400
    assert "use the link in" in response.json()["cursor"][0]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/usage/", NAMES),
        ("/usage/report/", ["period", "file", "account"]),
        ("/admin/ratelimits_usage/shardstate/", ["shard"]),
        ("/admin/ratelimits_usage/batch/", ["shard"]),
        ("/admin/ratelimits_billing/report/download/", ["period", "format"]),
    ],
)
def test_an_awkward_value_of_any_parameter_is_answered(admin_client: Client, path: str, names: list[str]) -> None:
    for name in names:
        for value in AWKWARD:
            other = {} if name == "period" or "report" not in path else {"period": "2026-11"}
            assert asked(admin_client, path, {**other, name: value}) in (200, 302, 400, 404), (name, value)


def test_a_month_has_digits_that_a_file_name_can_have(admin_client: Client) -> None:
    assert asked(admin_client, "/usage/report/", {"period": "٢٠٢٦-11"}) == 400


@brief
@given(parameters=st.dictionaries(st.sampled_from(NAMES), anything, max_size=4), place=st.none() | cursors)
@example(parameters={"from": "0001-01-01", "to": "9999-12-31", "timezone": "Pacific/Kiritimati"}, place=None)
def test_any_question_of_staff_is_answered(staff: Client, parameters: dict[str, str], place: str | None) -> None:
    if place is not None:
        parameters = {**parameters, "cursor": place}
    assert asked(staff, "/usage/", parameters) in (200, 400, 403, 404)
