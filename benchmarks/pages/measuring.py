"""Request pages with Django's test client, and measure the time and the number of queries."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

from benchmarks.pages.addresses import Page


@dataclass(slots=True)
class Measured:
    """The figures of one page. Times are medians in ms, but for `slowest_ms`.

    processor_ms     processor time of this process, without that of PostgreSQL
    queries          number of queries
    queries_ms       time of these queries in one request
    kb               size of the page
    hanging_adds_ms  the time that is added if Redis does not answer; None for a page that does not ask Redis
    """

    ms: float
    slowest_ms: float
    processor_ms: float
    queries: int
    queries_ms: float
    kb: int
    hanging_adds_ms: float | None = None


def measure(pages: Sequence[Page], rounds: int) -> dict[str, Measured]:
    """Request each page once in each round. At the end, replace Redis by a server that never answers."""
    client = Client()
    user, _new = User.objects.get_or_create(username="admin", is_superuser=True, is_staff=True)
    client.force_login(user)
    counted = {page.name: _count(client, page.url) for page in pages}
    times = _time(client, pages, rounds)
    results = {}
    for page in pages:
        taken, (number, seconds, size) = times[page.name], counted[page.name]
        wall, processor = [one[0] for one in taken], [one[1] for one in taken]
        results[page.name] = Measured(
            round(median(wall), 1), round(max(wall), 1), round(median(processor), 1), number, round(seconds, 1), size
        )
    asking = [page for page in pages if page.asks]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _use_server(silent.getsockname()[1])
        _time(client, asking, 1)
        for name, taken in _time(client, asking, max(rounds // 2, 1)).items():
            results[name].hanging_adds_ms = round(median(one[0] for one in taken) - results[name].ms, 1)
    return results


def _use_server(port: int) -> None:
    cache = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{port}/0"}
    override_settings(CACHES={**settings.CACHES, "ratelimits": cache}).enable()


def _count(client: Client, url: str) -> tuple[int, float, int]:
    """Return the number of queries of a page, their time in ms, and the size of the page in KB."""
    _get(client, url)  # After this, templates are compiled and the rules are in memory.
    with CaptureQueriesContext(connection) as queries:
        response = _get(client, url)
    seconds = sum(float(query["time"]) for query in queries.captured_queries)
    return len(queries), seconds * 1000, round(len(response.content) / 1024)


def _time(client: Client, pages: Sequence[Page], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return, by page, the time and the processor time of each request in ms."""
    times: dict[str, list[tuple[float, float]]] = {page.name: [] for page in pages}
    for _round in range(rounds):
        for page in pages:
            start, used = time.perf_counter(), time.process_time()
            _get(client, page.url)
            ends = time.perf_counter() - start, time.process_time() - used
            times[page.name].append((ends[0] * 1000, ends[1] * 1000))
    return times


def _get(client: Client, url: str) -> Any:
    response = client.get(url)
    assert response.status_code == 200, f"{url}: {response.status_code}"
    return response
