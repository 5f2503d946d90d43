"""Time the throttle alone, and whole requests through Django's WSGI handler to a view that does no work."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from statistics import median
from typing import Any
from zlib import crc32

from django.core.handlers.wsgi import WSGIHandler
from rest_framework.request import Request

from benchmarks.measured.peers import user_request
from benchmarks.support.timing import Case, Timed
from benchmarks.support.views import VIEWS
from ratelimits.throttling import QuotaThrottle

#: The view without a limit.
BASE = "unlimited"
#: Name of a view -> kind of its case (default: "ours").
_KINDS = {"ping": "floor", BASE: "floor", "bare": "floor", "drf_one": "peer", "drf_three": "peer"}
#: The attribute of Django's request with the list of decisions that the app can still refund.
_CHARGED = "_ratelimits_charged"


def whole_request(name: str, expected_status: str = "200 OK") -> Callable[[], object]:
    """Return a function that makes a whole request to the view `name` through Django's WSGI handler.

    The function returns whether the response has the expected status.
    """
    handler = WSGIHandler()
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": f"/{name}",
        "SCRIPT_NAME": "",
        "QUERY_STRING": "",
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "203.0.113.9",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.multithread": False,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    answered: list[str] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Any:
        answered[:] = [status]

    def ask() -> object:
        response: Any = handler({**environ, "wsgi.input": BytesIO(b"")}, start_response)
        b"".join(response)
        response.close()
        return answered == [expected_status]

    return ask


def _twice(ask: Callable[[], object]) -> Callable[[], object]:
    # The first request may be admitted. The second request is refused, and the process stores this refusal in its deny
    # cache. So the deny cache refuses all measured requests.
    return lambda: (ask(), ask())


def cases() -> list[Case]:
    """Return the cases: a whole request to each view of benchmarks.support.views."""
    out = []
    for name, (title, _view) in VIEWS.items():
        refused = name == "refused"
        ask = whole_request(name, "429 Too Many Requests" if refused else "200 OK")
        out.append(Case(name, title, _KINDS.get(name, "ours"), ask, before=_twice(ask) if refused else None))
    return out


def drf_request(user: int = 42) -> Request:
    """Return a request of Django REST framework by an authenticated user."""
    plain = user_request()
    plain.user.pk = user
    request = Request(plain)
    request.user, request.auth = plain.user, None
    return request


def throttle_call(name: str, user: int | None = None) -> Callable[[], object]:
    """Return a function that calls the throttle as DRF does: a new instance for each request.

    `name` is the name of the view. `user` is the user's id; by default each view has its own user.
    """
    request = drf_request(crc32(name.encode()) if user is None else user)
    _title, view_class = VIEWS[name]
    view = view_class()
    view.headers = {}
    attributes = vars(request._request)

    def ask() -> object:
        # All calls use one request. Delete its list of decisions, which would grow: a new request has no such list.
        attributes.pop(_CHARGED, None)
        return QuotaThrottle().allow_request(request, view)

    return ask


def throttle_cases() -> list[Case]:
    """Return the cases of the throttle alone: it admits, or it refuses by the deny cache."""
    admits, refused = throttle_call("ours"), throttle_call("refused")

    def refuses() -> object:
        return not refused()

    return [
        Case("throttle_three", "QuotaThrottle.allow_request, 3 rules + metering", "ours", admits),
        Case(
            "throttle_refused",
            "QuotaThrottle.allow_request, refused",
            "ours",
            refuses,
            before=_twice(refuses),
            inner=10,
        ),
    ]


def summary(timed: dict[str, Timed]) -> dict[str, dict[str, Any]]:
    """Return the time that each kind of limit adds to a request, and its ratio to the time that a raw PING adds."""
    base = timed[BASE]

    def added(name: str) -> float:
        return median(limited - unlimited for limited, unlimited in zip(timed[name].medians, base.medians, strict=True))

    out = {}
    for name, one in timed.items():
        out[name] = one.to_json()
        if name != BASE:
            out[name]["adds_us"] = round(added(name) / 1000, 3)
            out[name]["times_ping"] = round(added(name) / added("ping"), 3)
    return out
