"""Test how requests end, through Django's own handlers: streams, clients that hang up, and views that fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

import pytest
import redis
from django.core import signals
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import close_old_connections
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.decorators import api_view, permission_classes, throttle_classes
from rest_framework.exceptions import APIException
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from ratelimits.decorators import limited
from ratelimits.engine.clock import Clock
from ratelimits.quota import finishing, receipts
from ratelimits.quota.waiting import waiters
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.garbage import collect_garbage
from tests.support.hanging import FILES, Asgi, Wsgi, awaited, until
from tests.support.rows import arule, rule
from tests.support.servers import TestServers

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls("tests.quota.test_finishing"),
    # If a stream fails, Django's ASGI handler closes neither the response nor the request's body.
    pytest.mark.filterwarnings("ignore:Unclosed file <tempfile.SpooledTemporaryFile:ResourceWarning"),
]

OURS = "ratelimits.middleware.QuotaMiddleware"
#: What the views of a test have done, and what they wait for.
seen: list[str] = []
gate = threading.Event()


def pieces() -> Iterator[bytes]:
    yield b"one"
    yield b"two"


def broken_pieces() -> Iterator[bytes]:
    yield b"one"
    raise RuntimeError("the stream is broken")


async def apieces() -> AsyncIterator[bytes]:
    yield b"one"
    yield b"two"


async def abroken_pieces() -> AsyncIterator[bytes]:
    yield b"one"
    raise RuntimeError("the stream is broken")


def stream(request: HttpRequest) -> HttpResponseBase:
    return StreamingHttpResponse(pieces())


def broken_stream(request: HttpRequest) -> HttpResponseBase:
    return StreamingHttpResponse(broken_pieces())


def file(request: HttpRequest) -> HttpResponseBase:
    return FileResponse(BytesIO(b"one" * 100_000))


async def astream(request: HttpRequest) -> HttpResponseBase:
    return StreamingHttpResponse(apieces())


async def abroken_stream(request: HttpRequest) -> HttpResponseBase:
    return StreamingHttpResponse(abroken_pieces())


def whole(request: HttpRequest) -> HttpResponseBase:
    return HttpResponse("done")


async def awhole(request: HttpRequest) -> HttpResponseBase:
    return HttpResponse("done")


def failing(request: HttpRequest) -> HttpResponseBase:
    raise RuntimeError("the view is broken")


async def afailing(request: HttpRequest) -> HttpResponseBase:
    raise RuntimeError("the view is broken")


def settled(request: HttpRequest) -> HttpResponseBase:
    receipts.settle(request, {"requests": 7})
    raise RuntimeError("the view is broken")


async def asettled(request: HttpRequest) -> HttpResponseBase:
    await receipts.async_settle(request, {"requests": 7})
    raise RuntimeError("the view is broken")


def free(request: HttpRequest) -> HttpResponseBase:
    receipts.settle(request, {"requests": 0})
    raise RuntimeError("the view is broken")


def refunded(request: HttpRequest) -> HttpResponseBase:
    receipts.refund(request)
    raise RuntimeError("the view is broken")


def missing(request: HttpRequest) -> HttpResponseBase:
    raise Http404


def stopped(request: HttpRequest) -> HttpResponseBase:
    raise SystemExit(1)


def slow(request: HttpRequest) -> HttpResponseBase:
    seen.append("began")
    assert gate.wait(30)
    seen.append("ended")
    return HttpResponse("late")


async def aslow(request: HttpRequest) -> HttpResponseBase:
    seen.append("began")
    await asyncio.Event().wait()
    raise AssertionError


def noted(request: HttpRequest) -> HttpResponseBase:
    seen.append("ran")
    return HttpResponse("done")


VIEWS: list[Callable[..., Any]] = [
    *(stream, broken_stream, file, astream, abroken_stream, whole, awhole),
    *(failing, afailing, missing, stopped, slow, aslow, settled, asettled, free, refunded),
    noted,
]


def drf(view: Callable[[HttpRequest], HttpResponseBase]) -> Any:
    class View(APIView):
        permission_classes = [AllowAny]

        def get(self, request: Request) -> Any:
            return view(request._request)

    return View.as_view()


def api_function(view: Callable[[HttpRequest], HttpResponseBase]) -> Any:
    @api_view(["GET"])
    @throttle_classes([])
    @permission_classes([AllowAny])
    @limited()
    def function(request: Request) -> Any:
        return view(request._request)

    return function


def api_method(view: Callable[[HttpRequest], HttpResponseBase]) -> Any:
    class View(APIView):
        permission_classes = [AllowAny]
        throttle_classes: Sequence[Any] = []

        @method_decorator(limited())
        def get(self, request: Request) -> Any:
            return view(request._request)

    return View.as_view()


def api_set(view: Callable[[HttpRequest], HttpResponseBase]) -> Any:
    class Set(ViewSet):
        permission_classes = [AllowAny]
        throttle_classes: Sequence[Any] = []

        @method_decorator(limited())
        def list(self, request: Request) -> Any:
            return view(request._request)

    return Set.as_view({"get": "list"})


def api_response(request: HttpRequest) -> Any:
    return Response({"rendered": "later"})


def api_failing(request: HttpRequest) -> Any:
    raise APIException  # Django REST framework answers with 500


APIS = {"api-function": api_function, "api-method": api_method, "api-set": api_set}
urlpatterns = [
    *(
        path(f"{name}/{view.__name__}/", decorate(view))
        for name, decorate in APIS.items()
        for view in (stream, file, whole, failing, missing, api_response, api_failing)
    ),
    *(path(f"path/{view.__name__}/", view) for view in VIEWS),
    *(path(f"decorated/{view.__name__}/", limited()(view)) for view in VIEWS),
    *(path(f"drf/{view.__name__}/", drf(view)) for view in (stream, file, whole, failing, slow, noted)),
]


def sync_only(get_response: Callable[[HttpRequest], HttpResponseBase]) -> Callable[[HttpRequest], HttpResponseBase]:
    """Make a middleware that Django runs in a thread, together with all sync-capable middleware before it."""
    return get_response


SYNC_ONLY = "tests.quota.test_finishing.sync_only"
#: Lists of middleware, the outermost first. Without the app's middleware nothing limits by path.
STACKS = {"alone": [OURS], "below sync": [SYNC_ONLY, OURS], "above sync": [OURS, SYNC_ONLY], "none": []}
#: Each entry point of a sync view, and the list of middleware.
SYNC_WAYS = [
    (way, stack) for way in ("path", "decorated", "drf") for stack in STACKS if (way, stack) != ("path", "none")
]
#: One request an hour proceeds: the second one waits that long, and at most two wait.
QUEUE = {"capacity": 2, "rate": 1, "period": 3600, "max_wait": 100_000}

#: Each entry point, and whether the middleware is installed too.
WAYS = [
    *(("path", True), ("decorated", True), ("decorated", False), ("drf", True), ("drf", False)),
    *((way, there) for way in APIS for there in (True, False)),
]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    begin_afresh(monkeypatch)
    seen.clear()
    gate.clear()
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/path/"], "DENY_CACHE_SECONDS": 0}
    settings.MIDDLEWARE = [OURS]
    yield
    gate.set()
    collect_garbage()  # while that warning is ignored


@pytest.fixture
def wsgi(_afresh: None) -> Iterator[Callable[..., Wsgi]]:
    """Make requests to one application; close them at the end, but not the test's own connections."""
    application: list[WSGIHandler] = []
    made: list[Wsgi] = []

    def make(path: str, **environ: Any) -> Wsgi:
        application[:] = application or [WSGIHandler()]
        made.append(Wsgi(application[0], path, **environ))
        return made[-1]

    signals.request_started.disconnect(close_old_connections)
    signals.request_finished.disconnect(close_old_connections)
    yield make
    for one in made:
        one.close()
    signals.request_started.connect(close_old_connections)
    signals.request_finished.connect(close_old_connections)


def installed(settings: Any, is_there: bool) -> None:
    settings.MIDDLEWARE = [OURS] if is_there else []


def in_flight(capacity: int = 1) -> None:
    rule("flights", "concurrency", key_kind="global", capacity=capacity)


async def ain_flight(capacity: int = 1) -> None:
    await arule("flights", "concurrency", key_kind="global", capacity=capacity)


class TestStreamsOfWsgi:
    @pytest.mark.parametrize(("way", "there"), WAYS)
    @pytest.mark.parametrize("view", ["stream", "file"])
    @pytest.mark.parametrize("environ", [{}, FILES], ids=["plain", "files by the server"])
    def test_of_five_that_are_open_at_capacity_one_four_are_refused(
        self, wsgi: Callable[..., Wsgi], settings: Any, way: str, there: bool, view: str, environ: dict[str, Any]
    ) -> None:
        installed(settings, there)
        in_flight()
        open_ = [wsgi(f"/{way}/{view}/", **environ) for _ in range(5)]
        assert [one.status for one in open_] == [200, 429, 429, 429, 429]
        assert next(iter(open_[0].body)).startswith(b"one")
        assert wsgi(f"/{way}/{view}/", **environ).status == 429
        for one in reversed(open_):
            one.close()
        assert wsgi(f"/{way}/{view}/", **environ).status == 200

    @pytest.mark.parametrize(("way", "there"), [way for way in WAYS if way != ("drf", False)])
    def test_one_that_was_read_to_its_end_is_over_before_it_is_closed(
        self, wsgi: Callable[..., Wsgi], settings: Any, way: str, there: bool
    ) -> None:
        # A client that has read everything may ask again at once.
        installed(settings, there)
        in_flight()
        for _ in range(3):
            first = wsgi(f"/{way}/stream/")
            assert (first.status, b"".join(first.body)) == (200, b"onetwo")

    @pytest.mark.parametrize("way", ["path", "decorated"])
    def test_one_that_fails_on_its_way_is_over_and_stays_billed(
        self, wsgi: Callable[..., Wsgi], redis_client: redis.Redis, way: str
    ) -> None:
        in_flight()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                b"".join(wsgi(f"/{way}/broken_stream/").body)
        assert counted(redis_client) == {"a requests 0 - anonymous 1": 2}


class TestWholeResponses:
    @pytest.mark.parametrize(("way", "there"), [way for way in WAYS if way != ("drf", False)])
    def test_one_after_the_other_none_is_refused(
        self, wsgi: Callable[..., Wsgi], settings: Any, way: str, there: bool
    ) -> None:
        installed(settings, there)
        in_flight()
        assert [wsgi(f"/{way}/whole/").status for _ in range(3)] == [200] * 3

    def test_the_throttle_alone_has_its_leases_ended_with_the_request(
        self, wsgi: Callable[..., Wsgi], settings: Any
    ) -> None:
        installed(settings, False)
        in_flight()
        first = wsgi("/drf/whole/")
        assert wsgi("/drf/whole/").status == 429
        first.close()
        assert wsgi("/drf/whole/").status == 200

    @pytest.mark.parametrize(("way", "there"), WAYS)
    def test_a_view_that_fails_leaves_no_lease(
        self, wsgi: Callable[..., Wsgi], settings: Any, way: str, there: bool
    ) -> None:
        installed(settings, there)
        in_flight()
        for _ in range(3):
            request = wsgi(f"/{way}/failing/")
            assert request.status == 500
            request.close()

    @pytest.mark.parametrize(("way", "there"), [(way, there) for way in APIS for there in (True, False)])
    def test_a_lease_ends_with_the_rendered_response_of_an_api(
        self, wsgi: Callable[..., Wsgi], settings: Any, way: str, there: bool
    ) -> None:
        installed(settings, there)
        in_flight()
        for view in ("api_response", "api_failing", "missing"):
            request = wsgi(f"/{way}/{view}/")
            assert request.status == {"api_response": 200, "api_failing": 500, "missing": 404}[view]
            request.close()

    @pytest.mark.parametrize("way", APIS)
    def test_an_error_that_an_api_answers_is_given_back(
        self, wsgi: Callable[..., Wsgi], redis_client: redis.Redis, way: str
    ) -> None:
        rule("bucket", key_kind="global", capacity=1, rate="0.000001")
        assert wsgi(f"/{way}/api_failing/").status == 500
        assert {field[0]: many for field, many in counted(redis_client).items()} == {"a": 1, "r": 1}

    @pytest.mark.parametrize("way", ["path", "decorated", "drf", *APIS])
    @pytest.mark.parametrize(("billed", "left"), [(False, {"a": 1, "r": 1}), (True, {"a": 1})])
    def test_a_server_error_is_given_back_unless_errors_are_billed(
        self,
        wsgi: Callable[..., Wsgi],
        settings: Any,
        redis_client: redis.Redis,
        way: str,
        billed: bool,
        left: dict[str, int],
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "BILL_ERRORS": billed}
        rule("bucket", key_kind="global", capacity=1, rate="0.000001")
        assert wsgi(f"/{way}/failing/").status == 500
        assert {field[0]: many for field, many in counted(redis_client).items()} == left
        assert wsgi(f"/{way}/whole/").status == (429 if billed else 200)

    @pytest.mark.parametrize(
        ("view", "counts", "warned"),
        [
            ("settled", {"a 1": 1, "a u": 6}, True),
            ("asettled", {"a 1": 1, "a u": 6}, True),
            ("free", {"a 1": 1, "r u": 1}, False),
            ("refunded", {"a 1": 1, "r 1": 1}, False),
        ],
    )
    def test_what_was_settled_before_a_server_error_stays_billed_and_is_said(
        self,
        wsgi: Callable[..., Wsgi],
        redis_client: redis.Redis,
        caplog: pytest.LogCaptureFixture,
        view: str,
        counts: dict[str, int],
        warned: bool,
    ) -> None:
        assert wsgi(f"/path/{view}/").status == 500
        assert {f"{field[0]} {field[-1]}": many for field, many in counted(redis_client).items()} == counts
        assert ("stays billed" in caplog.text) == warned

    @pytest.mark.parametrize("way", ["path", "decorated"])
    def test_what_is_not_found_was_served(self, wsgi: Callable[..., Wsgi], redis_client: redis.Redis, way: str) -> None:
        assert wsgi(f"/{way}/missing/").status == 404
        assert counted(redis_client) == {"a requests 0 - anonymous 1": 1}

    @pytest.mark.parametrize(("way", "there"), [("path", True), ("decorated", True), ("decorated", False)])
    def test_a_worker_that_is_stopped_gives_back_what_it_did_not_serve(
        self, wsgi: Callable[..., Wsgi], settings: Any, redis_client: redis.Redis, way: str, there: bool
    ) -> None:
        installed(settings, there)
        in_flight()
        for _ in range(2):
            with pytest.raises(SystemExit):
                wsgi(f"/{way}/stopped/")
        assert sorted(counted(redis_client).items()) == [
            ("a requests 0 - anonymous 1", 2),
            ("r requests 0 - anonymous 1", 2),
        ]

    @pytest.mark.parametrize("way", ["path", "decorated", "drf"])
    def test_a_calendar_window_that_ends_at_this_moment_is_no_error(
        self, wsgi: Callable[..., Wsgi], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
    ) -> None:
        """By the server's clock the window has ended, whichever window the caller takes."""
        rule("month", "calendar_window", capacity=10)
        in_flight()
        taken = finishing._take_steps

        def late(*about: Any) -> Any:
            monkeypatch.setattr(Clock, "now", lambda _clock: time.time_ns() // 1000 - 62 * 86_400_000_000)
            return taken(*about)

        monkeypatch.setattr(finishing, "_take_steps", late)
        asked = wsgi(f"/{way}/whole/")
        asked.close()
        assert asked.status == 200
        assert "release of receipt" in caplog.text

    def test_what_governs_a_request_twice_is_finished_twice(self) -> None:
        in_flight(2)
        twice = limited()(limited()(whole))
        for _ in range(3):
            request = HttpRequest()
            assert twice(request).status_code == 200

    def test_a_request_that_was_closed_keeps_nothing(self) -> None:
        in_flight()
        request = HttpRequest()
        limited()(stream)(request)
        assert "close" in vars(request)
        request.close()
        assert "close" not in vars(request)
        assert limited()(stream)(HttpRequest()).status_code == 200


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume synchronous iterators")
class TestStreamsOfAsgi:
    @pytest.mark.parametrize(
        ("way", "there", "view"),
        [
            *((way, there, view) for way, there in WAYS[:3] for view in ("astream", "stream", "file")),
            *(("drf", there, view) for there in (True, False) for view in ("stream", "file")),
        ],
    )
    async def test_of_five_that_are_open_at_capacity_one_four_are_refused(
        self, settings: Any, way: str, there: bool, view: str
    ) -> None:
        installed(settings, there)
        await ain_flight()
        application = ASGIHandler()
        first = Asgi(application, f"/{way}/{view}/")
        await first.read(3)
        others = [Asgi(application, f"/{way}/{view}/") for _ in range(4)]
        await asyncio.gather(*(one.task for one in others))
        assert [first.status, *(one.status for one in others)] == [200, 429, 429, 429, 429]
        await first.hang_up()
        last = Asgi(application, f"/{way}/{view}/")
        await last.task
        assert (last.status, last.body[:3]) == (200, b"one")

    @pytest.mark.parametrize(("way", "there"), WAYS[:3])
    @pytest.mark.parametrize("view", ["abroken_stream", "broken_stream"])
    async def test_one_that_fails_on_its_way_is_over(self, settings: Any, way: str, there: bool, view: str) -> None:
        installed(settings, there)
        await ain_flight()
        application = ASGIHandler()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the stream is broken"):
                await Asgi(application, f"/{way}/{view}/").task

    @pytest.mark.parametrize(("way", "there"), WAYS[:3])
    async def test_one_after_the_other_none_is_refused(self, settings: Any, way: str, there: bool) -> None:
        installed(settings, there)
        await ain_flight()
        application = ASGIHandler()
        for view in ("astream", "awhole", "whole", "afailing", "stream"):
            request = Asgi(application, f"/{way}/{view}/")
            await request.task
            assert request.status == (500 if view == "afailing" else 200)


class TestHangUps:
    @pytest.mark.parametrize(("way", "there"), WAYS[:3])
    async def test_three_under_concurrency_three_do_not_block_the_fourth(
        self, settings: Any, redis_client: redis.Redis, way: str, there: bool
    ) -> None:
        installed(settings, there)
        await ain_flight(3)
        application = ASGIHandler()
        begun = [Asgi(application, f"/{way}/aslow/") for _ in range(3)]
        await until(lambda: len(seen) == 3)
        await asyncio.gather(*(one.hang_up() for one in begun))
        fourth = Asgi(application, f"/{way}/awhole/")
        await fourth.task
        assert fourth.status == 200
        # The view had begun, so its work is billed.
        assert counted(redis_client) == {"a requests 0 - anonymous 1": 4}

    @pytest.mark.parametrize("way", ["path", "decorated", "drf"])
    async def test_a_sync_view_is_in_flight_until_its_thread_has_ended_it(self, way: str) -> None:
        await ain_flight()
        application = ASGIHandler()
        first = Asgi(application, f"/{way}/slow/")
        await until(lambda: seen)
        going = asyncio.ensure_future(first.hang_up())
        await asyncio.sleep(0)
        second = Asgi(application, f"/{way}/whole/")
        await second.task
        assert second.status == 429
        gate.set()
        await going
        third = Asgi(application, f"/{way}/whole/")
        await third.task
        assert (seen, third.status) == (["began", "ended"], 200)

    @pytest.mark.parametrize("way", ["path", "decorated"])
    async def test_who_is_held_back_and_hangs_up_pays_nothing_and_keeps_no_place(
        self, redis_client: redis.Redis, way: str
    ) -> None:
        await arule("queue", "leaky_bucket_queue", key_kind="global", **QUEUE)
        application = ASGIHandler()
        await Asgi(application, f"/{way}/awhole/").task
        for number in range(1, 5):
            held = Asgi(application, f"/{way}/awhole/")
            await until(lambda: counted(redis_client)["a requests 0 - anonymous 1"] == 1 + number)  # noqa: B023
            await held.hang_up()
            assert counted(redis_client)["r requests 0 - anonymous 1"] == number

    @pytest.mark.parametrize(("way", "stack"), SYNC_WAYS)
    async def test_so_with_a_sync_view_which_does_not_run_any_more(
        self, settings: Any, redis_client: redis.Redis, way: str, stack: str
    ) -> None:
        settings.MIDDLEWARE = STACKS[stack]
        settings.RATELIMITS = {**settings.RATELIMITS, "MAX_WAITING": 1}
        await arule("queue", "leaky_bucket_queue", key_kind="global", **QUEUE)
        application = ASGIHandler()
        await Asgi(application, f"/{way}/noted/").task
        for number in range(1, 4):
            held = Asgi(application, f"/{way}/noted/")
            await until(lambda: counted(redis_client)["a requests 0 - anonymous 1"] == 1 + number)  # noqa: B023
            if stack in ("none", "above sync"):  # there nothing notices a client that leaves before the wait has begun
                await until(lambda: awaited("_await_unless_cancelled"))
            await held.hang_up()
            assert counted(redis_client)["r requests 0 - anonymous 1"] == number
        assert (seen, waiters._count) == (["ran"], 0)

    @pytest.mark.parametrize(("way", "stack"), [each for each in SYNC_WAYS if each[1] in ("alone", "below sync")])
    @pytest.mark.parametrize("waits", [True, False])
    async def test_so_too_if_the_decision_is_under_way(
        self, servers: TestServers, settings: Any, redis_client: redis.Redis, way: str, stack: str, waits: bool
    ) -> None:
        if way == "path" and stack == "alone":
            way = "decorated"  # there the middleware itself makes the decision, and is cancelled
        settings.MIDDLEWARE = STACKS[stack]
        if waits:
            await arule("queue", "leaky_bucket_queue", key_kind="global", **QUEUE)
        with Proxy(servers.redis.port) as proxy:
            away(settings, proxy.port)
            application = ASGIHandler()
            await Asgi(application, f"/{way}/noted/").task
            proxy.hold()
            before = proxy.count(b"EVALSHA")
            asking = Asgi(application, f"/{way}/noted/")
            await asyncio.to_thread(proxy.wait_for, b"EVALSHA", before + 1)
            going = asyncio.ensure_future(asking.hang_up())
            await asyncio.sleep(0.05)
            proxy.let_go()
            await going
        assert counted(redis_client) == {"a requests 0 - anonymous 1": 2, "r requests 0 - anonymous 1": 1}
        assert seen == ["ran"]

    def test_a_second_cancellation_does_not_stop_what_is_given_back(self) -> None:
        done: list[str] = []

        async def twice() -> None:
            begun = threading.Event()

            def do() -> None:
                begun.set()
                assert gate.wait(30)
                done.append("given back")

            task = asyncio.ensure_future(finishing._call_despite_cancellation(do))
            await until(begun.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            await until(lambda: done)

        asyncio.run(twice())
        assert done == ["given back"]
