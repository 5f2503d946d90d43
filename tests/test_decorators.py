"""Test the decorator on classes of views, whose handlers are sync or async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from ratelimits.decorators import limited
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.test_decorators")]


@method_decorator(limited("things"), name="dispatch")
class Dispatched(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


@method_decorator(limited("things"), name="dispatch")
class AsyncDispatched(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class Handled(View):
    @method_decorator(limited("things"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class AsyncHandled(View):
    @method_decorator(limited("things"))
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


class Async(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


urlpatterns = [
    path("dispatched/", Dispatched.as_view()),
    path("async-dispatched/", AsyncDispatched.as_view()),
    path("handled/", Handled.as_view()),
    path("async-handled/", AsyncHandled.as_view()),
    path("async-called/", limited("things")(Async.as_view())),
]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.fixture(params=["wsgi", "asgi"])
def statuses(request: pytest.FixtureRequest) -> Callable[[str, str], list[int]]:
    """Return a function that makes three requests with a method to a path, and returns their statuses."""

    async def asked(method: str, path: str) -> list[int]:
        client: Any = AsyncClient()
        return [(await getattr(client, method)(path)).status_code for _ in range(3)]

    if request.param == "asgi":
        return lambda method, path: asyncio.run(asked(method, path))
    return lambda method, path: [getattr(Client(), method)(path).status_code for _ in range(3)]


@pytest.mark.parametrize("name", ["dispatched", "async-dispatched", "handled", "async-handled", "async-called"])
def test_a_class_is_limited_however_it_is_decorated(statuses: Callable[[str, str], list[int]], name: str) -> None:
    rule("few", scope="things", capacity=2, rate="0.000001")
    assert statuses("get", f"/{name}/") == [200, 200, 429]


@pytest.mark.parametrize("name", ["dispatched", "async-dispatched"])
def test_a_method_without_a_handler_is_limited_too(statuses: Callable[[str, str], list[int]], name: str) -> None:
    rule("few", scope="things", capacity=2, rate="0.000001")
    assert statuses("put", f"/{name}/") == [405, 405, 429]


def test_a_view_that_has_returned_has_ended_its_lease() -> None:
    """Call the views themselves: the test client also closes each request, which would end a lease at the latest."""
    rule("places", "concurrency", scope="things", capacity=1)
    request = RequestFactory().get

    async def asked() -> list[int]:
        return [(await AsyncHandled().get(request("/"))).status_code for _ in range(2)]

    assert [Handled().get(request("/")).status_code for _ in range(2)] == [200, 200]
    assert asyncio.run(asked()) == [200, 200]
