"""The views of tests.support.runtimes.promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.decorators import limited
from ratelimits.throttling import ScopedRateThrottle, UserRateThrottle


def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


async def apage(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def fails(request: HttpRequest) -> HttpResponse:
    raise ValueError("a mistake of the view")


async def afails(request: HttpRequest) -> HttpResponse:
    raise ValueError("a mistake of the view")


def stream(request: HttpRequest) -> StreamingHttpResponse:
    def parts() -> Iterator[bytes]:
        yield from (b"a", b"b")

    async def aparts() -> AsyncIterator[bytes]:
        for part in (b"a", b"b"):
            yield part

    return StreamingHttpResponse(aparts() if isinstance(request, ASGIRequest) else parts())


class Hello(APIView):
    def get(self, request: Request) -> Response:
        return Response({})


class Scoped(Hello):
    throttle_classes = (ScopedRateThrottle,)
    throttle_scope = "scoped"


class Timed(UserRateThrottle):
    """A subclass as projects have it: it calls `timer`, as that of Django REST framework does."""

    rate = "3/hour"

    def allow_request(self, request: Any, view: Any) -> bool:
        self.now = self.timer()
        return super().allow_request(request, view)


BOUNDED: dict[str, Any] = {"cost": {"tokens": "query:tokens"}, "cost_bounds": {"tokens": (1, 8_000)}}


#: In an event loop, the views are async, as its project would write them.
PAGE, FAILS = (apage, afails) if getattr(settings, "ASYNC_VIEWS", False) else (page, fails)

urlpatterns = [
    path("path/", page),
    *(path(f"{scope}/", limited(scope)(PAGE)) for scope in ("plain", "dated", "many", "back")),
    path("error/", limited("leased")(FAILS)),
    path("api-error/", api_view()(limited("leased")(fails))),
    path("stream/", limited("leased")(stream)),
    path("scoped/", Scoped.as_view()),
    path("timed/", Hello.as_view(throttle_classes=[Timed])),
    path("costs/", limited("costs", **BOUNDED)(PAGE)),
]
