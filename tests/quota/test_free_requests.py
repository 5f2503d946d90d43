"""Test that a request with a cost of 0 passes an exhausted limit: it takes nothing, so there is nothing to refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest, StreamingHttpResponse
from django.test import RequestFactory

from ratelimits.decorators import limited
from ratelimits.quota import receipts
from tests.support.entry_points import begin_afresh, counted
from tests.support.rows import NEEDED, rule

pytestmark = pytest.mark.django_db(transaction=True)

#: Fields with which each algorithm admits at most two requests of this test.
SLOW: dict[str, Any] = {"capacity": 1, "rate": "0.001", "period": 1, "max_wait": 0}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a request with a cost, and returns the response. All requests stay open."""
    begin_afresh(monkeypatch)
    open_: list[Any] = []

    def asked(cost: int, settled: int | None = None) -> Any:
        @limited(cost=cost)
        def view(request: HttpRequest) -> StreamingHttpResponse:
            if settled is not None:
                receipts.settle(request, {"requests": settled})
            return StreamingHttpResponse(iter([b"open"]))

        request = RequestFactory().get("/")
        request.user = AnonymousUser()
        open_.append((request, view(request)))
        return open_[-1][1]

    yield asked
    for request, _response in open_:
        request.close()


def exhaust(algorithm: str, ask: Callable[..., Any]) -> None:
    fields = {name: SLOW.get(name, value) for name, value in NEEDED[algorithm].items()}
    if "max_wait" in fields and algorithm.startswith("smooth"):
        fields["max_wait"] = 1
    if "window" in algorithm or algorithm == "sliding_log":
        fields["period"] = fields.get("period") and 86_400
    rule("few", algorithm, **{name: value for name, value in fields.items() if value is not None})
    assert 429 in [ask(1).status_code for _ in range(3)]


@pytest.mark.parametrize("algorithm", NEEDED)
def test_under_each_algorithm(algorithm: str, ask: Callable[..., Any], redis_client: redis.Redis) -> None:
    exhaust(algorithm, ask)
    admitted = {name: many for name, many in counted(redis_client).items() if name.startswith("a")}
    free = ask(0)
    assert free.status_code == 200
    assert "Retry-After" not in free
    assert ";r=0" in free["RateLimit"] or algorithm == "leaky_bucket_queue"
    assert ask(1).status_code == 429, "a request with a cost is refused as before"
    assert {name: many for name, many in counted(redis_client).items() if name.startswith("a")} != admitted, (
        "the free request is counted"
    )


@pytest.mark.parametrize("algorithm", ["token_bucket", "gcra", "fixed_window", "calendar_window", "sliding_log"])
def test_under_a_limit_that_was_exceeded_by_settling(algorithm: str, ask: Callable[..., Any]) -> None:
    rule("few", algorithm, **{**NEEDED[algorithm], "capacity": 5})
    ask(1, settled=50)
    assert [ask(cost).status_code for cost in (1, 0)] == [429, 200]


def test_under_capacity_0_and_with_a_second_meter(ask: Callable[..., Any]) -> None:
    rule("nothing", "fixed_window", capacity=0, period=60)
    assert [ask(cost).status_code for cost in (1, 0)] == [429, 200]
