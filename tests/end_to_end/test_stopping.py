"""Test that processes that are asked to stop write their counts, under every server and pool that the docs name."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db.models import Sum

from project.celery import app
from project.demo import processes
from project.models import ApiKey
from ratelimits.usage.models import DurabilityGap, ProcessTotal
from tests.support.engine.proxy import Proxy
from tests.support.eventually import until
from tests.support.forked import Forked, popen_for
from tests.support.rows import rule
from tests.support.servers import TestServers

GUNICORN = ("gunicorn", "--workers", "1", "--bind", "fd://{fd}", "--no-control-socket")
SERVERS = {
    "gunicorn, sync": (*GUNICORN, "project.wsgi"),
    "gunicorn, gthread": (*GUNICORN, "--threads", "4", "project.wsgi"),
    "gunicorn, gevent": (*GUNICORN, "-k", "gevent", "project.wsgi"),
    "gunicorn, preload": (*GUNICORN, "--threads", "4", "--preload", "project.wsgi"),
    "gunicorn, recycled": (*GUNICORN, "--max-requests", "20", "project.wsgi"),
    "gunicorn, asgi": (*GUNICORN, "-k", "asgi", "project.asgi"),
    "gunicorn, uvicorn": (*GUNICORN, "-k", "uvicorn.workers.UvicornWorker", "project.asgi:application"),
    "uvicorn": ("uvicorn", "--fd", "{fd}", "project.asgi:application"),
}
POOLS = ("prefork", "threads", "solo", "gevent")
Key = tuple[ApiKey, str]


@pytest.fixture
def settings_of_others(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of processes that write nothing at intervals."""
    return {**environment, "DJANGO_SETTINGS_MODULE": "tests.support.end_to_end.stopping_settings"}


@pytest.fixture
def nowhere() -> Iterator[str]:
    """Return the URL of a server that refuses every connection."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{unused.getsockname()[1]}/0"


@contextmanager
def served(arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> Iterator[int]:
    """Run a web server on a port; after the block send it SIGTERM and wait until it has ended."""
    with processes.listening_socket(0) as listener:
        listener.set_inheritable(True)
        named = [argument.format(fd=listener.fileno()) for argument in arguments]
        port: int = listener.getsockname()[1]
        started = processes.running(
            named, log, environment, pass_fds=(listener.fileno(),), popen=popen_for("gevent" in arguments)
        )
        with started as process:
            processes.wait_until_up(f"http://127.0.0.1:{port}/", process, log)
            yield port
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def ask(port: int, secret: str, times: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    for _ in range(times):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/time/", headers={"Authorization": f"Api-Key {secret}"})
        with connection.getresponse() as response:
            response.read()
            statuses[response.status] += 1
        connection.close()
    return statuses


def denied(client: redis.Redis) -> int:
    """Return how many requests the open batches count as denied."""
    fields = (item for key in client.keys("rl:*:open") for item in client.hgetall(key).items())
    return sum(int(value) for name, value in fields if name[:2] == b"d|" and name[-2:] in (b"|1", b"|n"))


def said(kind: str) -> int:
    """Return how many requests of a kind the totals of all processes have."""
    found: int | None = ProcessTotal.objects.filter(kind=kind).aggregate(sum=Sum("requests"))["sum"]
    return found or 0


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_that_stops_has_counted_every_refusal(
    server: str,
    settings_of_others: dict[str, str],
    issue_key: Callable[[str], Key],
    redis_client: redis.Redis,
    tmp_path: Path,
) -> None:
    rule("one", "fixed_window", capacity=1, period=700_000_000)
    _key, secret = issue_key("acme")
    log = tmp_path / "server.log"
    with served(SERVERS[server], settings_of_others, log) as port:
        assert ask(port, secret, 36) == {200: 1, 429: 35}, log.read_text()
    assert (denied(redis_client), said("admitted")) == (35, 1), log.read_text()


@pytest.mark.parametrize("server", ["gunicorn, gthread", "gunicorn, gevent", "gunicorn, uvicorn", "uvicorn"])
def test_a_server_that_stops_has_declared_what_it_let_through_unmetered(
    server: str, settings_of_others: dict[str, str], issue_key: Callable[[str], Key], nowhere: str, tmp_path: Path
) -> None:
    rule("one", "fixed_window", capacity=1, period=700_000_000)
    _key, secret = issue_key("acme")
    log = tmp_path / "server.log"
    with served(SERVERS[server], {**settings_of_others, "LIMITS_URL": nowhere}, log) as port:
        assert ask(port, secret, 30) == {200: 30}, log.read_text()
    assert said("unmetered") == 30, log.read_text()
    gaps = DurabilityGap.objects.filter(kind="unmetered").aggregate(units=Sum("units"))
    assert gaps["units"] == 30


def test_a_process_that_is_killed_has_declared_what_it_let_through_unmetered(
    settings_of_others: dict[str, str], issue_key: Callable[[str], Key], nowhere: str, tmp_path: Path
) -> None:
    rule("one", "fixed_window", capacity=1, period=700_000_000)
    _key, secret = issue_key("acme")
    environment = {**settings_of_others, "LIMITS_URL": nowhere}
    with served(SERVERS["uvicorn"], environment, tmp_path / "server.log") as port:
        assert ask(port, secret, 30) == {200: 30}
        until(lambda: said("unmetered") == 30, "what was let through is declared while the process runs")


@contextmanager
def worker(pool: str, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = [
        "celery",
        "-A",
        "tests.support.end_to_end.stopping_tasks",
        "worker",
        "--pool",
        pool,
        "--concurrency",
        "2",
    ]
    with processes.running(arguments, log, environment, popen=popen_for(pool == "gevent")) as process:
        yield process
        stop(process)


def have_asked(times: int) -> None:
    """Have one task make this many requests, and wait for it."""
    app.send_task("tests.ask", ("user:7", times))
    with redis.Redis.from_url(settings.CELERY_BROKER_URL) as broker:
        until(lambda: broker.llen("asked"), "the task has asked")


@pytest.mark.parametrize("pool", POOLS)
def test_a_celery_worker_that_stops_has_written_what_its_tasks_counted(
    pool: str, settings_of_others: dict[str, str], redis_client: redis.Redis, tmp_path: Path
) -> None:
    rule("one", "fixed_window", key_kind="user", capacity=1, period=700_000_000)
    log = tmp_path / "celery.log"
    with worker(pool, settings_of_others, log):
        have_asked(36)
    assert (denied(redis_client), said("admitted")) == (35, 1), log.read_text()


@pytest.mark.parametrize("pool", POOLS)
def test_a_celery_worker_that_stops_has_declared_what_its_tasks_did_unmetered(
    pool: str, settings_of_others: dict[str, str], nowhere: str, tmp_path: Path
) -> None:
    rule("one", "fixed_window", key_kind="user", capacity=1, period=700_000_000)
    environment: dict[str, Any] = {**settings_of_others, "LIMITS_URL": nowhere}
    log = tmp_path / "celery.log"
    with worker(pool, environment, log):
        have_asked(30)
    assert said("unmetered") == 30, log.read_text()


HOLDS_PERMITS = """
import sys, time, django
django.setup()
from ratelimits.quota import checking as quota
from ratelimits.usage.counting import process_totals
from ratelimits.identity import Identity
for user in range(50):
    for _ in range(2):
        assert quota.check(Identity(f"user:{user}")).allowed
process_totals.admitted("account:acme", {"requests": 1}, time.time_ns() // 1000)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_ends_while_redis_hangs_tries_it_once_and_writes_its_totals(
    settings_of_others: dict[str, str], servers: TestServers
) -> None:
    rule("ahead", "fixed_window", key_kind="user", capacity=10_000, period=700_000_000, prefetch=64)
    with Proxy(servers.redis.port) as proxy:
        holding = Forked(
            [sys.executable, "-c", HOLDS_PERMITS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Prefetched permits last longer than the test, so that none is given back before the process stops.
            env={**settings_of_others, "LIMITS_URL": proxy.url, "HELD_SECONDS": "3600", "RATELIMITS_TIMEOUT": "0.25"},
        )
        assert holding.stdout is not None
        assert holding.stdout.readline() == b"held\n"
        before = proxy.count(b"EVALSHA") + proxy.connections
        proxy.lose.set()
        holding.communicate(b"\n")
        # On an existing connection, or on a new one.
        assert 1 <= proxy.count(b"EVALSHA") + proxy.connections - before <= 2
    # Each of the 100 requests fetched permits, so Redis counted it in the same call.
    assert (holding.returncode, said("admitted")) == (0, 100 + 1)
