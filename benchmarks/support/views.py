"""A view that does no work, once for each kind of limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any
from zlib import crc32

from django.conf import settings
from django.contrib.auth import get_user_model
from django.urls import path
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from benchmarks.measured import floors, ours
from benchmarks.measured.floors import PING, RawSocket
from benchmarks.measured.peers import steady
from ratelimits.throttling import QuotaThrottle


class PathAuthentication(BaseAuthentication):
    """Authenticates each request as a user whose id is made from the path. This needs no query."""

    def authenticate(self, request: Request) -> tuple[Any, None]:
        return get_user_model()(pk=crc32(request.path.encode())), None


@cache
def _raw() -> RawSocket:
    return RawSocket(str(settings.CACHES["ratelimits"]["LOCATION"]))


class PingThrottle(BaseThrottle):
    """A throttle that only sends a PING."""

    def allow_request(self, request: Request, view: APIView) -> bool:
        return _raw().exchange(PING) == b"+PONG\r\n"


@cache
def _bare() -> bytes:
    """Load the bare script. Return the command that calls it for 3 rules with metering."""
    floors.load(str(settings.CACHES["ratelimits"]["LOCATION"]))
    return floors.bare(*floors.THREE_RULES)


class BareThrottle(BaseThrottle):
    """A throttle that only calls the bare script, on a plain socket."""

    def allow_request(self, request: Request, view: APIView) -> bool:
        return _raw().exchange(_bare())[:1] == b"*"


@cache
def _decide() -> Callable[[], object]:
    """Return a function that sends the prepared command for 3 rules with metering."""
    return ours.deciding(ours.engine_server(), ours.call_of(ours.three_limits(), time.time_ns() // 1000))


class EngineThrottle(BaseThrottle):
    """A throttle that only sends a prepared command: the same limits and the same user each time."""

    def allow_request(self, request: Request, view: APIView) -> bool:
        return bool(_decide()())


class Unlimited(APIView):
    """The view without a limit. All other views are subclasses."""

    authentication_classes = [PathAuthentication]
    throttle_classes: list[type[BaseThrottle]] = []

    def get(self, request: Request) -> Response:
        return Response({"ok": True})


def _limited(*throttles: type[BaseThrottle], **attributes: Any) -> type[Unlimited]:
    return type("Limited", (Unlimited,), {"throttle_classes": list(throttles), **attributes})


#: Path -> title and view.
VIEWS: dict[str, tuple[str, type[Unlimited]]] = {
    "unlimited": ("no throttle", Unlimited),
    "ping": ("raw PING", _limited(PingThrottle)),
    "bare": ("bare script, 3 rules on one key + metering", _limited(BareThrottle)),
    "engine": ("engine, 3 rules on one key + metering", _limited(EngineThrottle)),
    "drf_one": ("DRF's throttle", _limited(steady(10))),
    "drf_three": ("DRF's throttle, three of them", _limited(steady(10), steady(10), steady(10))),
    "ours": ("QuotaThrottle, 3 rules + metering + headers", _limited(QuotaThrottle, throttle_scope="three")),
    "ours_kinds": ("QuotaThrottle, user + account + global", _limited(QuotaThrottle, throttle_scope="kinds")),
    "refused": ("QuotaThrottle, refused", _limited(QuotaThrottle, throttle_scope="refused")),
}
urlpatterns = [path(name, view.as_view()) for name, (_title, view) in VIEWS.items()]
