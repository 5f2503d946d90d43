"""Test the decorator on classes of views, whose handlers are sync or async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from ninja import NinjaAPI
from ninja.errors import HttpError
from rest_framework.decorators import api_view, permission_classes, throttle_classes
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.viewsets import ViewSet

from ratelimits import ninja as operations
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


@limited("things")
def missing(request: HttpRequest) -> HttpResponse:
    raise Http404


@limited("things")
async def async_missing(request: HttpRequest) -> HttpResponse:
    raise Http404


@limited("things")
def forbidden(request: HttpRequest) -> HttpResponse:
    raise PermissionDenied


@api_view()
@throttle_classes([])
@permission_classes([])
@limited("things")
def api_missing(request: Request) -> HttpResponse:
    raise NotFound


class Gone(ViewSet):
    throttle_classes = ()
    permission_classes = ()

    @method_decorator(limited("things"))
    def list(self, request: Request) -> HttpResponse:
        error = NotFound()
        error.status_code = 410
        raise error


ninja = NinjaAPI(urls_namespace="decorators", docs_url=None)


@ninja.get("/teapot/")
@operations.limited("things")
def teapot(request: HttpRequest) -> str:
    raise HttpError(418, "I am a teapot.")


@ninja.get("/async-teapot/")
@operations.limited("things")
async def async_teapot(request: HttpRequest) -> str:
    raise HttpError(418, "I am a teapot.")


urlpatterns = [
    path("missing/", missing),
    path("async-missing/", async_missing),
    path("forbidden/", forbidden),
    path("api-missing/", api_missing),
    path("api-gone/", Gone.as_view({"get": "list"})),
    path("", ninja.urls),
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


def test_a_path_in_PATHS_charges_a_class_with_a_decorated_method_once(
    statuses: Callable[[str, str], list[int]], settings: Any
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/"]}
    rule("few", capacity=2, rate="0.000001")
    assert statuses("get", "/handled/") == [200, 200, 429]


def test_a_head_request_to_it_is_charged_once(statuses: Callable[[str, str], list[int]], settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/"]}
    rule("few", capacity=2, rate="0.000001")
    assert statuses("head", "/handled/") == [200, 200, 429]


def test_the_method_of_a_class_needs_the_decorator_for_methods() -> None:
    class Direct(View):
        @limited("things")
        def get(self, request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

        @limited("things")
        async def post(self, request: HttpRequest) -> HttpResponse:
            raise NotImplementedError

    said = r"Direct\.(get|post): limited got <.*Direct object.* instead of a request.*@method_decorator\(limited\(…\)\)"
    with pytest.raises(ImproperlyConfigured, match=said):
        Direct().get(RequestFactory().get("/"))
    with pytest.raises(ImproperlyConfigured, match=said):
        asyncio.run(Direct().post(RequestFactory().post("/")))


#: Each view that raises an error, and the status of its response.
FAILING = [("missing", 404), ("async-missing", 404), ("forbidden", 403), ("api-missing", 404), ("api-gone", 410)]
FAILING += [("teapot", 418), ("async-teapot", 418)]


@pytest.mark.parametrize("server", ["wsgi", "asgi"])
@pytest.mark.parametrize(("name", "status"), FAILING)
def test_the_response_to_an_error_of_the_view_has_the_fields_too(server: str, name: str, status: int) -> None:
    rule("few", "fixed_window", scope="things", capacity=2, period=3600)
    url = f"/{name}/"
    responses: list[Any] = [
        Client().get(url) if server == "wsgi" else asyncio.run(AsyncClient().get(url)) for _ in "123"
    ]
    assert [one.status_code for one in responses] == [status, status, 429]
    assert [one["RateLimit"].partition(";t=")[0] for one in responses] == ['"few";r=1', '"few";r=0', '"few";r=0']
    assert responses[0]["RateLimit-Policy"] == '"few";q=2;w=3600'
    assert "Retry-After" not in responses[0]


def test_of_a_path_and_a_view_the_view_is_shown_also_after_its_error(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": {"/": {"scope": "site", "api_views": True}}}
    rule("few", "fixed_window", scope="things", capacity=2, period=3600)
    rule("many", "fixed_window", scope="site", capacity=9, period=3600)
    assert Client().get("/missing/")["RateLimit"].startswith('"few";r=1;')
    assert Client().get("/nowhere/")["RateLimit"].startswith('"many";r=7;')


def test_a_view_that_has_returned_has_ended_its_lease() -> None:
    """Call the views themselves: the test client also closes each request, which would end a lease at the latest."""
    rule("places", "concurrency", scope="things", capacity=1)
    request = RequestFactory().get

    async def asked() -> list[int]:
        return [(await AsyncHandled().get(request("/"))).status_code for _ in range(2)]

    assert [Handled().get(request("/")).status_code for _ in range(2)] == [200, 200]
    assert asyncio.run(asked()) == [200, 200]
