"""Test many requests at the same moment under a limit that is used up, while the server is up: none may pass."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import redis
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse
from django.urls import path
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.answers.answer import Answer
from ratelimits.decorators import limited
from ratelimits.engine.server import breaker, current_server
from ratelimits.engine.transport.idle import IDLE_CONNECTIONS
from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.rules import query_thread
from ratelimits.throttling import QuotaThrottle
from tests.support.entry_points import begin_afresh
from tests.support.eventually import until
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.end_to_end.test_bursts")]


class View(APIView):
    authentication_classes = ()
    permission_classes = (AllowAny,)
    throttle_classes = (QuotaThrottle,)

    def get(self, request: Request) -> Response:
        return Response("passed")


@limited()
async def awaited(request: HttpRequest) -> HttpResponse:
    return HttpResponse("passed")


urlpatterns = [path("sync/", View.as_view()), path("async/", awaited)]


@pytest.fixture(autouse=True)
def _used_up(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Use up a limit that all requests share; no process repeats a refusal from memory."""
    begin_afresh(monkeypatch)
    # A busy machine may keep a thousand threads waiting for the rules. The database must not count as away.
    monkeypatch.setattr(query_thread, "PATIENCE", 60)
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    rule("all", "token_bucket", capacity=10, rate=1, period=86_400, key_kind="global")
    assert [checking.check(someone(0)).allowed for _ in range(11)] == [True] * 10 + [False]


def check_as(number: int, _thread: int) -> None:
    checking.check(someone(number))


def someone(number: int) -> Identity:
    return Identity(user=f"user:{number}")


def answers(found: list[Answer]) -> Counter[str]:
    """Return how many requests passed, were refused by the limit, and were answered by the failure policy."""
    kinds = ("passed" if one.allowed else "unavailable" if one.decision is None else "refused" for one in found)
    return Counter(kinds)


def connections(client: redis.Redis) -> set[str]:
    """Return the ids of the server's connections. Those of earlier tests may end at any moment."""
    return {connection["id"] for connection in client.client_list()}


def until_closed(client: redis.Redis, before: set[str]) -> None:
    """Wait until the server has no new connections. It notices a moment later that one was closed."""
    until(lambda: connections(client) <= before, "connections that are closed")


async def ask_at_once(tasks: int) -> Counter[str]:
    return answers(await asyncio.gather(*(checking.acheck(someone(number)) for number in range(tasks))))


def test_three_thousand_tasks_at_once_cold_and_warm(redis_client: redis.Redis) -> None:
    async def both() -> list[Counter[str]]:
        return [await ask_at_once(3000), await ask_at_once(3000)]

    before = connections(redis_client)

    async def and_connections() -> set[str]:
        assert await both() == [Counter(refused=3000)] * 2
        return connections(redis_client)

    assert len(asyncio.run(and_connections()) - before) == 1
    assert breaker.closed
    until_closed(redis_client, before)


def test_a_thousand_tasks_whose_script_was_forgotten_load_it_once(redis_client: redis.Redis) -> None:
    async def forgotten() -> int:
        await ask_at_once(10)
        redis_client.script_flush()
        redis_client.config_resetstat()
        assert await ask_at_once(1000) == Counter(refused=1000)
        stats: Any = redis_client.info("commandstats")
        return sum(one["calls"] for name, one in stats.items() if name in ("cmdstat_script", "cmdstat_script|load"))

    assert asyncio.run(forgotten()) == 1


def test_loops_that_come_and_go_leave_nothing(redis_client: redis.Redis) -> None:
    before = connections(redis_client)
    for _ in range(30):
        assert asyncio.run(ask_at_once(20)) == Counter(refused=20)
    until_closed(redis_client, before)
    assert len(current_server().wire._loops) == 0


def in_threads(threads: int, work: Callable[[int], None]) -> None:
    every = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in every:
        thread.start()
    for thread in every:
        thread.join()


def test_four_hundred_threads_at_once(redis_client: redis.Redis) -> None:
    before = connections(redis_client)
    found: list[Answer] = []
    ready = threading.Barrier(400)

    def work(number: int) -> None:
        ready.wait()
        found.append(checking.check(someone(number)))

    in_threads(400, work)
    assert answers(found) == Counter(refused=400)
    assert breaker.closed
    assert len(connections(redis_client) - before) <= IDLE_CONNECTIONS


@pytest.mark.parametrize(("view", "most"), [("sync", IDLE_CONNECTIONS + 1), ("async", 1)])
def test_a_thousand_views_at_once_behind_asgi(redis_client: redis.Redis, settings: Any, view: str, most: int) -> None:
    """Behind ASGI, Django runs each request of a sync view in its own thread."""
    settings.MIDDLEWARE = []
    before = connections(redis_client)
    handler = ASGIHandler()

    async def ask(number: int) -> int:
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "path": f"/{view}/",
            "raw_path": f"/{view}/".encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"testserver")],
            "client": (f"203.0.113.{number % 250}", 1),
            "server": ("testserver", 80),
            "http_version": "1.1",
        }
        sent: list[dict[str, Any]] = []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # a client that does not go away
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(dict(message))

        await handler(scope, receive, send)
        status: int = sent[0]["status"]
        return status

    async def all_at_once() -> Counter[int]:
        found = Counter(await asyncio.gather(*(ask(number) for number in range(1000))))
        assert len(connections(redis_client) - before) <= most
        return found

    assert asyncio.run(all_at_once()) == Counter({429: 1000})
    assert breaker.closed


def test_short_threads_one_after_the_other_use_one_connection_and_learn_its_run_once(
    redis_client: redis.Redis,
) -> None:
    stats: Any = redis_client.info("stats")
    before = stats["total_connections_received"]
    redis_client.config_resetstat()
    for number in range(200):
        in_threads(1, partial(check_as, number))
    stats = redis_client.info("commandstats")
    assert stats.get("cmdstat_info", {"calls": 0})["calls"] <= 1
    stats = redis_client.info("stats")
    assert stats["total_connections_received"] - before <= 1
