"""Test Django's own cache with limited views: nobody receives the fields or the refusal of another caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.views.decorators.cache import cache_control, cache_page
from rest_framework.decorators import api_view, permission_classes, throttle_classes
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.answers.answer import Answer
from ratelimits.decorators import limited
from ratelimits.throttling import AnonRateThrottle, QuotaThrottle
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule
from tests.support.snippets import snippet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.answers.test_caching")]

#: One text for each time that a view has run.
ran: list[str] = []
cached = cache_page(60, cache="pages")


def page(request: HttpRequest, **arguments: Any) -> HttpResponse:
    ran.append(request.path_info)
    return HttpResponse(str(len(ran)))


def rendered(request: HttpRequest) -> TemplateResponse:
    ran.append(request.path_info)
    return TemplateResponse(request, engines["django"].from_string(str(len(ran))))


@api_view()
@throttle_classes([])
@permission_classes([])
@limited()
@cached
def api(request: Request) -> Response:
    ran.append(request.path_info)
    return Response(len(ran))


class ByRate(AnonRateThrottle):
    rate = "2/day"


class Throttled(APIView):
    permission_classes = ()
    throttle_classes = (QuotaThrottle,)

    def get(self, request: Request) -> Response:
        ran.append(request.path_info)
        return Response(len(ran))


class ThrottledByRate(Throttled):
    throttle_classes = (ByRate,)  # type: ignore[assignment]


urlpatterns = [
    path("free/", page),
    path("path/", page),
    path("inside/", limited()(cached(page))),
    path("inside-rendered/", limited()(cached(rendered))),
    path("inside-api/", api),
    path("outside/", cached(limited()(page))),
    path("outside-rendered/", cached(limited()(rendered))),
    path("outside-throttle/", cached(Throttled.as_view())),
    path("outside-rate/", cached(ThrottledByRate.as_view())),
    path("shared/", cached(cache_control(public=True)(limited()(page)))),
]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    begin_afresh(monkeypatch)
    pages = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "pages"}
    settings.CACHES = {**settings.CACHES, "pages": pages}
    settings.MIDDLEWARE = ["ratelimits.middleware.QuotaMiddleware"]
    ran.clear()
    yield
    caches["pages"].clear()


def asked(url: str, address: str = "203.0.113.9") -> Any:
    return Client().get(url, REMOTE_ADDR=address)


def few(**fields: Any) -> None:
    rule("few", "fixed_window", capacity=2, period=86_400, key_kind="ip", **fields)


def shown(answers: list[Any]) -> list[str]:
    return [answer.get("RateLimit", "").partition(";t=")[0] for answer in answers]


@pytest.mark.parametrize("name", ["inside", "inside-rendered", "inside-api"])
def test_below_the_decorator_a_page_is_cached_and_each_request_is_decided(name: str) -> None:
    few()
    answers = [asked(f"/{name}/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.content for answer in answers[:2]] == [b"1", b"1"]
    assert shown(answers) == ['"few";r=1', '"few";r=0', '"few";r=0']
    other = asked(f"/{name}/", "203.0.113.10")
    assert (other.content, shown([other])) == (b"1", ['"few";r=1'])
    assert "private" in other["Cache-Control"]


@pytest.mark.parametrize("name", ["outside", "outside-rendered", "outside-throttle", "outside-rate"])
def test_above_the_limit_nothing_is_cached(name: str) -> None:
    few()
    answers = [asked(f"/{name}/") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.content for answer in answers[:2]] == [b"1", b"2"]
    assert asked(f"/{name}/", "203.0.113.10").content == b"3"
    assert answers[0]["Cache-Control"] == "private"
    assert answers[2]["Cache-Control"] == "no-store, private"


def test_a_page_that_says_that_all_may_share_it_is_cached_without_fields() -> None:
    few()
    answers = [asked("/shared/", f"203.0.113.{number}") for number in (9, 9, 9, 10)]
    assert [answer.content for answer in answers] == [b"1"] * 4
    # Only the first response passes the decorator. It has lost its fields where the middleware sees "public".
    assert shown(answers[:1]) == [""]


SITE = [
    "django.middleware.cache.UpdateCacheMiddleware",
    "ratelimits.middleware.QuotaMiddleware",
    "django.middleware.cache.FetchFromCacheMiddleware",
]


def page_of_the_project(request: HttpRequest, answer: Answer) -> HttpResponse:
    return HttpResponse("slow down", status=200)


def test_the_cache_of_a_whole_site_stores_what_is_not_limited(settings: Any) -> None:
    settings.MIDDLEWARE, settings.CACHE_MIDDLEWARE_ALIAS = SITE, "pages"
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/path/"], "REFUSAL_RESPONSE": page_of_the_project}
    few()
    assert [asked("/free/").content for _ in range(2)] == [b"1", b"1"]
    answers = [asked("/path/") for _ in range(3)]
    assert [answer.content for answer in answers] == [b"2", b"3", b"slow down"]
    assert asked("/path/", "203.0.113.10").content == b"4", "nobody gets the refusal of another caller"


def test_the_page_of_the_documentation_is_cached(settings: Any) -> None:
    names: dict[str, Any] = {"render": lambda request, template: page(request)}
    exec(snippet("def prices(request)").text, names)
    settings.CACHES = {**settings.CACHES, "default": settings.CACHES["pages"]}
    few(scope="prices")
    answers: list[Any] = []
    for _ in range(3):
        request = RequestFactory().get("/prices/", REMOTE_ADDR="203.0.113.9")
        request.user = AnonymousUser()
        answers.append(names["prices"](request))
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert ran == ["/prices/"]
