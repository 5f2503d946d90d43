"""The views of the project in site.py."""

from __future__ import annotations

from adrf.views import APIView as AsyncView
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.throttling import ScopedRateThrottle, UserRateThrottle


class Burst(UserRateThrottle):
    scope, rate = "burst", "2/hour"


class Sustained(UserRateThrottle):
    scope, rate = "sustained", "4/day"


class Default(APIView):
    def get(self, request: Request) -> Response:
        return Response({"hello": "world"})


class Together(Default):
    throttle_classes = [Sustained, Burst]


class Scoped(Default):
    throttle_classes = [ScopedRateThrottle]
    throttle_scope = "search"


class Free(Default):
    throttle_classes = []


class Async(AsyncView):  # type: ignore[misc]
    throttle_classes = [Sustained, Burst]

    async def get(self, request: Request) -> Response:
        return Response({"hello": "world"})


VIEWS: dict[str, type[APIView]] = {
    "default": Default,
    "together": Together,
    "scoped": Scoped,
    "free": Free,
    "async": Async,
}
