"""Test streams and clients that hang up, with real servers: gunicorn and uvicorn."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from project.demo import processes
from ratelimits.models import Rule
from tests.support.entry_points import counted
from tests.support.forked import Forked

SECONDS = 60.0
Serve = Callable[[str], int]


@pytest.fixture
def serve(environment: dict[str, str], tmp_path: Path) -> Iterator[Serve]:
    """Start a server of tests.support.end_to_end.flights; return its port."""
    environment["DJANGO_SETTINGS_MODULE"] = "tests.support.end_to_end.flights_settings"
    log = tmp_path / "server.log"
    with processes.listening_socket(0) as listener:
        port: int = listener.getsockname()[1]
        fd = listener.fileno()
        arguments = {
            "gunicorn": [
                *("gunicorn", "django.core.wsgi:get_wsgi_application()", "--bind", f"fd://{fd}", "--threads", "8"),
                "--no-control-socket",
            ],
            "uvicorn": [
                *("uvicorn", "django.core.asgi:get_asgi_application", "--factory", "--fd", str(fd)),
                *("--lifespan", "off"),
            ],
        }
        running = []

        def start(kind: str) -> int:
            block = processes.running(arguments[kind], log, environment, pass_fds=(fd,), popen=Forked)
            running.append(block)
            processes.wait_until_up(f"http://127.0.0.1:{port}/", block.__enter__(), log)
            return port

        yield start
        for block in running:
            block.__exit__(None, None, None)


def ask(port: int, path: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return connection


def status(connection: socket.socket) -> int:
    """Read only the status."""
    line = b""
    while not line.endswith(b"\r\n"):
        line += connection.recv(1)
    return int(line.split()[1])


def eventually(condition: Callable[[], bool]) -> None:
    """Ask until the condition holds: nobody knows when the server notices that a client has gone."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def status_of(port: int, path: str) -> int:
    with ask(port, path) as connection:
        return status(connection)


def test_of_five_streams_at_capacity_one_four_are_refused_until_the_first_is_left(serve: Serve) -> None:
    Rule.objects.create(name="flights", key_kind="global", algorithm="concurrency", capacity=1)
    port = serve("gunicorn")
    open_ = [ask(port, "/stream/") for _ in range(5)]
    assert sorted(status(one) for one in open_) == [200, 429, 429, 429, 429]
    for one in open_:
        one.close()
    eventually(lambda: status_of(port, "/stream/") == 200)


def test_three_that_hang_up_at_concurrency_three_do_not_block_the_fourth(
    serve: Serve, redis_client: redis.Redis
) -> None:
    Rule.objects.create(name="flights", key_kind="global", algorithm="concurrency", capacity=3)
    port = serve("uvicorn")
    begun = [ask(port, "/work/") for _ in range(3)]
    eventually(lambda: counted(redis_client).get("a requests 0 - anonymous 1") == 3)
    assert status_of(port, "/done/") == 429
    for one in begun:
        one.close()
    eventually(lambda: status_of(port, "/done/") == 200)


def test_who_is_held_back_in_front_of_a_sync_view_and_hangs_up_keeps_no_place(
    serve: Serve, redis_client: redis.Redis
) -> None:
    queue = {"capacity": 1, "rate": 1, "period": 3600, "max_wait": 100_000}
    Rule.objects.create(name="queue", key_kind="global", algorithm="leaky_bucket_queue", **queue)
    port = serve("uvicorn")
    assert status_of(port, "/sync/") == 200
    for number in range(1, 4):
        held = ask(port, "/sync/")
        eventually(lambda: counted(redis_client).get("a requests 0 - anonymous 1") == 1 + number)  # noqa: B023
        held.close()
        eventually(lambda: counted(redis_client).get("r requests 0 - anonymous 1") == number)  # noqa: B023
