"""Test the promises under each web server: exact limits, own connections, no blocked process, a clean end."""

from __future__ import annotations

import http.client
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from project.demo import processes
from ratelimits.identity import Identity
from ratelimits.quota import checking
from tests.runtimes import watching
from tests.runtimes.row import Row
from tests.support.engine.proxy import Proxy
from tests.support.eventually import until
from tests.support.forked import popen_for
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

#: Requests that come at once, from a thread each, and the limit that all of them share.
ASKED, LIMIT = 48, 20
#: Rounds of as many requests, under a limit that refuses none.
ROUNDS = 3
WORKERS = 2


class Server(NamedTuple):
    """A web server as it is started, and the views that it serves.

    at_once      requests that one process works on at the same time; 0: any number
    connections  the most connections that the decisions of all processes need
    """

    arguments: tuple[str, ...]
    views: str
    at_once: int
    connections: int


_GUNICORN = ("gunicorn", "--workers", "2", "--bind", "fd://{fd}", "--no-control-socket")
_WSGI, _ASGI = "tests.support.runtimes.application:wsgi", "tests.support.runtimes.application:asgi"
_UVICORN = ("uvicorn", "--workers", "2", "--fd", "{fd}", "--lifespan", "off", _ASGI)
_HYPERCORN = ("hypercorn", "--workers", "2", "--bind", "fd://{fd}", _ASGI)
SERVERS = {
    "gunicorn, sync": Server((*_GUNICORN, _WSGI), "sync", 1, WORKERS),
    "gunicorn, sync, `--preload`": Server((*_GUNICORN, "--preload", _WSGI), "sync", 1, WORKERS),
    "gunicorn, gthread": Server((*_GUNICORN, "--threads", "8", _WSGI), "sync", 8, 8 * WORKERS),
    "gunicorn, gthread, `--preload`": Server(
        (*_GUNICORN, "--threads", "8", "--preload", _WSGI), "sync", 8, 8 * WORKERS
    ),
    "gunicorn, gevent": Server((*_GUNICORN, "-k", "gevent", _WSGI), "sync", 0, ASKED),
    "gunicorn, asgi, sync views": Server((*_GUNICORN, "-k", "asgi", _ASGI), "sync", 0, ASKED),
    "gunicorn, asgi, async views": Server((*_GUNICORN, "-k", "asgi", _ASGI), "async", 0, WORKERS),
    "uvicorn, sync views": Server(_UVICORN, "sync", 0, ASKED),
    "uvicorn, async views": Server(_UVICORN, "async", 0, WORKERS),
    "hypercorn, sync views": Server(_HYPERCORN, "sync", 0, ASKED),
    "hypercorn, async views": Server(_HYPERCORN, "async", 0, WORKERS),
}
#: The servers that run without `--long`.
SAMPLE = {"gunicorn, gthread, `--preload`", "hypercorn, async views"}


def get(port: int, path: str) -> tuple[int, int]:
    """Return the status of a request on a connection of its own, and the number of the process that answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", path, headers={"Connection": "close"})
    with connection.getresponse() as response:
        text = response.read()
    connection.close()
    return response.status, int(text) if response.status == 200 else 0


class Running:
    """A server that runs, and what it has answered."""

    def __init__(self, server: Server, port: int, process: subprocess.Popen[bytes], pool: ThreadPoolExecutor) -> None:
        self.server, self.port, self.process, self.pool = server, port, process, pool
        self.statuses: Counter[int] = Counter()
        #: The processes that have answered.
        self.workers: set[int] = set()

    def ask(self, view: str) -> int:
        """Make a limited request, and return the status."""
        status, pid = get(self.port, f"/{self.server.views}/{view}/")
        self.statuses[status] += 1
        self.workers |= {pid} - {0}
        return status

    def together(self, view: str, times: int) -> Counter[int]:
        """Make this number of requests at once, and return the number of each status."""
        return Counter(self.pool.map(self.ask, [view] * times))

    def answered(self) -> bool:
        """Make a request without a limit, and return whether all processes have answered one."""
        # An ASGI server answers it from its event loop, not from a thread that may wait.
        views = "sync" if self.server.arguments[-1] == _WSGI else "async"
        self.free_workers.add(get(self.port, f"/{views}/free/")[1])
        return len(self.free_workers) == WORKERS

    free_workers: set[int]

    def all_answer(self) -> None:
        """Wait until all processes have answered a request without a limit."""
        self.free_workers = set()
        until(self.answered, "each process answers")


@contextmanager
def running(server: Server, environment: dict[str, str], log: Path) -> Iterator[Running]:
    """Run a web server. The block sends SIGTERM; afterwards wait until the server has ended."""
    with ThreadPoolExecutor(ASKED) as pool, processes.listening_socket(0) as listener:
        listener.set_inheritable(True)
        arguments = [one.format(fd=listener.fileno()) for one in server.arguments]
        port: int = listener.getsockname()[1]
        started = processes.running(
            arguments, log, environment, pass_fds=(listener.fileno(),), popen=popen_for("gevent" in arguments)
        )
        with started as process:
            processes.wait_until_up(f"http://127.0.0.1:{port}/", process, log)
            yield Running(server, port, process, pool)
            process.wait(60)


def answers_while_one_waits(one: Running, proxy: Proxy) -> bool | None:
    """Return whether all processes answer while requests wait for Redis. None if they can do only one thing."""
    if one.server.at_once == 1:
        return None
    before = proxy.count(b"EVALSHA")
    proxy.hold()
    try:
        # So many that one is in each process.
        waiting = [one.pool.submit(one.ask, "wide") for _ in range(6)]
        until(lambda: proxy.count(b"EVALSHA") > before, "a request waits for Redis")
        one.all_answer()
        still_waiting = not any(each.done() for each in waiting)
    finally:
        proxy.let_go()
    return still_waiting and all(each.result() == 200 for each in waiting)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.long]) for name in SERVERS]
)
def test_a_web_server_keeps_all_promises(
    name: str,
    surroundings: dict[str, str],
    proxy: Proxy,
    redis_client: redis.Redis,
    tmp_path: Path,
    runtime_rows: list[Row],
) -> None:
    server, log = SERVERS[name], tmp_path / "server.log"
    rule("many", "fixed_window", scope="many", key_kind="global", capacity=LIMIT, period=700_000_000)
    rule("wide", "fixed_window", scope="wide", key_kind="global", capacity=100_000, period=700_000_000)
    rule("hold", "concurrency", scope="hold", key_kind="global", capacity=1)
    with running(server, surroundings, log) as one:
        one.all_answer()
        workers = one.free_workers
        many = one.together("many", ASKED)
        assert many == {200: LIMIT, 429: ASKED - LIMIT}, log.read_text()
        seen = []
        for _ in range(ROUNDS):
            assert one.together("wide", ASKED) == {200: ASKED}, log.read_text()
            seen.append(watching.connections(one.process.pid, proxy.port))
        until(lambda: one.ask("wide") == 200 and one.workers >= workers, "each process has made decisions")
        free = answers_while_one_waits(one, proxy)
        seen.append(watching.connections(one.process.pid, proxy.port))
        held = one.pool.submit(one.ask, "hold")
        until(lambda: (tmp_path / "held").exists(), "the view has a lease")
        one.process.send_signal(signal.SIGTERM)
        (tmp_path / "release").touch()
        assert held.result() == 200, log.read_text()
    denied = one.statuses[429]
    row = Row(
        name,
        len(workers),
        ASKED,
        LIMIT,
        many[200],
        max(len(each) for each in seen),
        sum(count > 1 for each in seen for count in each.values()),
        free,
        (watching.refusals(redis_client), denied),
        (watching.admissions(), one.statuses[200]),
        0 if checking.check(Identity("user:1"), "hold").allowed else 1,
    )
    print(f"\n{row}")
    runtime_rows.append(row)
    assert (row.shared, row.leases, row.free) == (0, 0, None if server.at_once == 1 else True)
    # Each process has one more for the work beside its requests, and so has the process that forks them.
    assert row.connections <= server.connections + WORKERS + 1
    assert row.refusals == (denied, denied), log.read_text()
    assert row.totals == (one.statuses[200], one.statuses[200]), log.read_text()
