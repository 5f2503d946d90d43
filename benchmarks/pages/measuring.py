"""Request pages with Django's test client, and measure the time and the number of queries."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

from benchmarks.pages.addresses import Page


@dataclass(slots=True)
class Measured:
    """The numbers of one page.

    ms               median time of a request, in ms
    slowest_ms       longest time of a request, in ms
    processor_ms     median processor time of this process, in ms. The processor time of PostgreSQL is not included
    queries          number of queries in one request
    queries_ms       time of all queries in one request, in ms
    kb               size of the page, in KB
    hanging_adds_ms  median time that is added if Redis does not answer, in ms. None for a page that does not ask Redis
    """

    ms: float
    slowest_ms: float
    processor_ms: float
    queries: int
    queries_ms: float
    kb: int
    hanging_adds_ms: float | None = None


def measure(pages: Sequence[Page], rounds: int) -> dict[str, Measured]:
    """Request each page once in each round, and return the numbers by the name of the page.

    Then time the pages that ask Redis again: in turns with Redis and with a server that never answers.
    """
    client = Client()
    user, _new = User.objects.get_or_create(username="admin", is_superuser=True, is_staff=True)
    client.force_login(user)
    counted = {page.name: _count(client, page.url) for page in pages}
    times = _time(client, pages, rounds)
    results = {}
    for page in pages:
        queries, queries_ms, kb = counted[page.name]
        wall_ms = [one.wall_ms for one in times[page.name]]
        processor_ms = [one.processor_ms for one in times[page.name]]
        results[page.name] = Measured(
            ms=round(median(wall_ms), 1),
            slowest_ms=round(max(wall_ms), 1),
            processor_ms=round(median(processor_ms), 1),
            queries=queries,
            queries_ms=round(queries_ms, 1),
            kb=kb,
        )
    for name, added in _hanging_adds(client, [page for page in pages if page.asks], rounds).items():
        results[name].hanging_adds_ms = round(added, 1)
    return results


def _hanging_adds(client: Client, pages: Sequence[Page], turns: int) -> dict[str, float]:
    """Return, by page, the time in ms that is added if Redis accepts connections and never answers.

    The added time is the median over the turns. Each turn times the pages with the Redis server and with a server that
    never answers. So the load on the machine is the same for both times. After each change of the server, the first
    request of each page is not timed, because it also loads the rules and connects.
    """
    added: dict[str, list[float]] = {page.name: [] for page in pages}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        caches = {**settings.CACHES, "ratelimits": {**settings.CACHES["ratelimits"], "LOCATION": location}}
        for _turn in range(turns):
            _time(client, pages, 1)
            answering = _time(client, pages, 1)
            with override_settings(CACHES=caches):
                _time(client, pages, 1)
                hanging = _time(client, pages, 1)
            for name, differences in added.items():
                differences.append(hanging[name][0].wall_ms - answering[name][0].wall_ms)
    return {name: median(differences) for name, differences in added.items()}


def _count(client: Client, url: str) -> tuple[int, float, int]:
    """Return the number of queries of a page, their time in ms, and the size of the page in KB."""
    _get(client, url)  # this request compiles the templates and loads the rules
    with CaptureQueriesContext(connection) as queries:
        response = _get(client, url)
    seconds = sum(float(query["time"]) for query in queries.captured_queries)
    return len(queries), seconds * 1000, round(len(response.content) / 1024)


class _Time(NamedTuple):
    """The time of one request, and the processor time that this process has used for it."""

    wall_ms: float
    processor_ms: float


def _time(client: Client, pages: Sequence[Page], rounds: int) -> dict[str, list[_Time]]:
    """Return, by page, the times of each request."""
    times: dict[str, list[_Time]] = {page.name: [] for page in pages}
    for _round in range(rounds):
        for page in pages:
            start, used = time.perf_counter(), time.process_time()
            _get(client, page.url)
            wall, processor = time.perf_counter() - start, time.process_time() - used
            times[page.name].append(_Time(wall * 1000, processor * 1000))
    return times


def _get(client: Client, url: str) -> Any:
    response = client.get(url)
    assert response.status_code == 200, f"{url}: {response.status_code}"
    return response
