"""Test which costs and scopes a view may have, at each entry point."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
import redis
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import ImproperlyConfigured
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.functional import lazystr
from django.utils.translation import gettext_lazy
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.decorators import limited
from ratelimits.quota.costs import MAX_METERS
from ratelimits.throttling import QuotaThrottle
from ratelimits.unknown_names import named_by_views
from ratelimits.usage.counting import process_totals
from tests.support.entry_points import begin_afresh, counted
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

#: A function that makes one request to a view with this cost and scope, and returns the status.
Ask = Callable[..., int]


class Whole(IntEnum):
    TWO = 2


class Scopes(models.TextChoices):
    SEARCH = "search"


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


def throttled(cost: Any, scope: Any) -> int:
    class Throttled(APIView):
        permission_classes = [AllowAny]
        throttle_classes = [QuotaThrottle]
        throttle_scope = scope
        throttle_cost = staticmethod(cost) if callable(cost) else cost

        def get(self, request: Request) -> Response:
            return Response()

    status: int = Throttled.as_view()(RequestFactory().get("/")).status_code
    return status


def asked() -> HttpRequest:
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    return request


def decorated(cost: Any, scope: Any) -> int:
    @limited(scope, cost)
    def throttled(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    return throttled(asked()).status_code


def awaited(cost: Any, scope: Any) -> int:
    @limited(scope, cost)
    async def throttled(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    response: HttpResponse = asyncio.run(throttled(asked()))
    return response.status_code


@pytest.fixture(params=[throttled, decorated, awaited])
def ask(request: pytest.FixtureRequest) -> Ask:
    def asks(cost: Any = None, scope: Any = "*") -> int:
        status: int = request.param(cost, scope)
        return status

    return asks


class TestCosts:
    @pytest.mark.parametrize(
        ("cost", "said"),
        [
            (1.5, "1.5"),
            (-1, "-1"),
            (-0.5, "-0.5"),
            (2**40 + 1, "1099511627777"),
            (10**5000, "a int of too many digits"),
            (float("nan"), "nan"),
            (float("inf"), "inf"),
            (Decimal("NaN"), "Decimal('NaN')"),
            (Decimal("sNaN"), "Decimal('sNaN')"),
            (True, "True"),
            ("3", "'3'"),
            ("words", "'words'"),
            (b"3", "b'3'"),
            ([1], "[1]"),
            (1j, "1j"),
            ("x" * 1000, "'xxx"),
        ],
        ids=lambda value: repr(value)[:20] if not isinstance(value, int) or value < 2**50 else "huge",
    )
    def test_what_is_no_cost_is_said_with_the_view(self, ask: Ask, cost: Any, said: str) -> None:
        for made in (cost, lambda *_: cost, {"requests": cost}):
            with pytest.raises(ValueError) as error:
                ask(made)
            text = str(error.value)
            assert text.startswith("tests.answers.test_responses.")
            assert "hrottled: the cost in 'requests' must be a whole number from 0 to 2**40, not " + said in text
            assert len(text) < 400

    @pytest.mark.parametrize(
        ("costs", "said"),
        [
            ({}, "a request needs at least one meter, such as {'requests': 1}"),
            ({7: 1}, "a meter must be a text such as 'requests', not 7"),
            ({None: 1}, "a meter must be a text such as 'requests', not None"),
            ({b"requests": 1}, "a meter must be a text such as 'requests', not b'requests'"),
            ({"": 1}, "a meter must be a text such as 'requests', not ''"),
            ({"requests": None}, "the cost in 'requests' must be a whole number from 0 to 2**40, not None"),
            (
                {f"meter_{number}": 1 for number in range(MAX_METERS + 1)},
                "a request is counted by at most 16 meters, not 17",
            ),
            (
                {"x" * 256: 1},
                "a meter has at most 255 characters and does not begin with '~': "
                + repr("x" * 256)[:197]
                + "... is wrong",
            ),
            ({"~b835": 1}, "a meter has at most 255 characters and does not begin with '~': '~b835' is wrong"),
        ],
        ids=["empty", "number", "none", "bytes", "no name", "no cost", "many", "long", "like a digest"],
    )
    def test_what_is_no_mapping_of_meters_is_said_with_the_view(self, ask: Ask, costs: Any, said: str) -> None:
        for made in (costs, lambda *_: costs):
            with pytest.raises(ValueError) as error:
                ask(made)
            assert str(error.value).endswith(f"hrottled: {said}")

    @pytest.mark.parametrize("cost", [2, 2.0, Decimal("2.00"), Whole.TWO, {"requests": 2}, lambda *_: 2])
    def test_whole_numbers_are_counted(self, ask: Ask, redis_client: redis.Redis, cost: Any) -> None:
        assert ask(cost) == 200
        assert counted(redis_client)["a requests 0 - anonymous u"] == 2

    def test_a_callable_that_says_nothing_costs_one_request(self, ask: Ask, redis_client: redis.Redis) -> None:
        assert ask(lambda *_: None) == 200
        assert counted(redis_client) == {"a requests 0 - anonymous 1": 1}

    def test_as_many_meters_as_there_may_be(self, ask: Ask, redis_client: redis.Redis) -> None:
        rule("bucket", capacity=1, rate="0.000001", key_kind="global", meter="meter_15")
        costs = {f"meter_{number}": 1 for number in range(MAX_METERS)}
        assert [ask(costs) for _ in range(2)] == [200, 429]
        assert len(counted(redis_client)) == 2 * MAX_METERS

    @pytest.mark.parametrize("meter", ["\ud800", "nul \0", "é" * 255, "a|b#c\n"])
    def test_a_meter_that_nobody_can_type_is_an_error(self, ask: Ask, redis_client: redis.Redis, meter: str) -> None:
        with pytest.raises(ValueError, match="a meter has only letters from a to z, digits, '-' and '_'"):
            ask({meter: 1})
        assert counted(redis_client) == {}

    def test_whole_numbers_of_any_type_add_up(self, ask: Ask) -> None:
        for cost in (1, 1.0, Decimal(2), 2.0, Fraction(3), Whole.TWO):
            assert ask({"requests": cost, "tokens": cost}) == 200
        sums = {key.meter: total for key, total in process_totals.totals().items()}
        assert sums == {"requests": (6, 11), "tokens": (6, 11)}
        assert {type(units) for _requests, units in sums.values()} == {int}


class TestScopes:
    @pytest.mark.parametrize("scope", [7, 1.5, True, b"search", ["search"], ("search",), {"search": 1}, object()])
    def test_what_is_no_text_is_said_with_the_view(self, ask: Ask, scope: Any) -> None:
        with pytest.raises(ImproperlyConfigured, match=r"hrottled: the scope must be a text such as 'search', not "):
            ask(scope=scope)

    @pytest.mark.parametrize("scope", ["search", lazystr("search"), gettext_lazy("search"), Scopes.SEARCH])
    def test_lazy_texts_and_choices_are_texts(self, ask: Ask, scope: Any) -> None:
        rule("bucket", scope="search", capacity=1, rate="0.000001", key_kind="global")
        assert [ask(scope=scope) for _ in range(2)] == [200, 429]

    @pytest.mark.parametrize("scope", ["\ud800", "nul \0", "x" * 100_000])
    def test_any_text_is_a_scope(self, ask: Ask, scope: str) -> None:
        assert ask(scope=scope) == 200


class Odd(APIView):
    throttle_cost = {7: 1, "tokens": 2}


def test_the_admin_knows_the_meters_that_are_texts(settings: Any) -> None:
    from django.urls import path

    class Urls:
        urlpatterns = [path("odd/", Odd.as_view())]

    settings.ROOT_URLCONF = Urls
    assert named_by_views().meters == frozenset({"requests", "tokens"})
