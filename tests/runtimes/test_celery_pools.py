"""Test the promises under each pool of a Celery worker: exact limits, own connections, a clean end."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from django.conf import settings

from project.celery import app
from project.demo import processes
from ratelimits.identity import Identity
from ratelimits.quota import checking
from tests.runtimes import watching
from tests.runtimes.row import Row
from tests.runtimes.test_web_servers import ASKED, LIMIT, ROUNDS
from tests.support.engine.proxy import Proxy
from tests.support.eventually import until
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)


class Pool(NamedTuple):
    """A pool: tasks that run at the same time, and processes in which they run."""

    name: str
    at_once: int
    children: int


POOLS = (Pool("prefork", 2, 2), Pool("threads", 4, 1), Pool("gevent", 20, 1))


def asked(broker: redis.Redis, scope: str) -> list[tuple[bool, int]]:
    """Have tasks make as many requests as usual. Return whether each is allowed, and its process."""
    broker.delete("answers")
    for _ in range(ASKED):
        app.send_task("tests.ask", (scope,))
    until(lambda: broker.llen("answers") == ASKED, "all tasks have asked")
    return [tuple(json.loads(text)) for text in broker.lrange("answers", 0, -1)]


def works_while_one_waits(broker: redis.Redis, proxy: Proxy) -> bool:
    """Return whether a task ends while another one waits for Redis."""
    broker.delete("answers")
    before = proxy.count(b"EVALSHA")
    proxy.hold()
    try:
        app.send_task("tests.ask", ("wide",))
        until(lambda: proxy.count(b"EVALSHA") > before, "a task waits for Redis")
        app.send_task("tests.ask", ("",))
        until(lambda: broker.llen("answers"), "another task ends")
        still_waiting = broker.llen("answers") == 1
    finally:
        proxy.let_go()
    until(lambda: broker.llen("answers") == 2, "the task that waited ends")
    return still_waiting


@pytest.mark.long
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_a_celery_worker_keeps_all_promises(
    pool: Pool,
    surroundings: dict[str, str],
    proxy: Proxy,
    redis_client: redis.Redis,
    tmp_path: Path,
    runtime_rows: list[Row],
) -> None:
    log = tmp_path / "celery.log"
    rule("many", "fixed_window", scope="many", key_kind="user", capacity=LIMIT, period=700_000_000)
    rule("wide", "fixed_window", scope="wide", key_kind="user", capacity=100_000, period=700_000_000)
    rule("hold", "concurrency", scope="hold", key_kind="user", capacity=1)
    arguments = ["celery", "-A", "tests.support.runtimes.tasks", "worker"]
    arguments += ["--pool", pool.name, "--concurrency", str(pool.at_once)]
    with (
        redis.Redis.from_url(settings.CELERY_BROKER_URL) as broker,
        processes.running(arguments, log, surroundings) as worker,
    ):
        many = asked(broker, "many")
        assert Counter(allowed for allowed, _pid in many) == {True: LIMIT, False: ASKED - LIMIT}, log.read_text()
        children, seen, admitted = {pid for _allowed, pid in many}, [], LIMIT
        for _ in range(ROUNDS):
            wide = asked(broker, "wide")
            assert all(allowed for allowed, _pid in wide), log.read_text()
            admitted += len(wide)
            children |= {pid for _allowed, pid in wide}
            seen.append(watching.connections(worker.pid, proxy.port))
        # A child of prefork has one task at a time.
        free = None if pool.name == "prefork" else works_while_one_waits(broker, proxy)
        admitted += free is not None
        app.send_task("tests.hold")
        until(lambda: (tmp_path / "held").exists(), "the task has a lease")
        worker.send_signal(signal.SIGTERM)
        (tmp_path / "release").touch()
        worker.wait(60)
    row = Row(
        f"Celery, {pool.name}",
        len(children),
        ASKED,
        LIMIT,
        sum(allowed for allowed, _pid in many),
        max(len(each) for each in seen),
        sum(count > 1 for each in seen for count in each.values()),
        free,
        (watching.refusals(redis_client), ASKED - LIMIT),
        (watching.admissions(), admitted + 1),
        0 if checking.check(Identity("user:7"), "hold").allowed else 1,
    )
    print(f"\n{row}")
    runtime_rows.append(row)
    assert (row.processes, row.shared, row.leases) == (pool.children, 0, 0)
    assert row.free is not False
    assert row.connections <= pool.at_once + 1 + pool.children
    assert row.refusals == (ASKED - LIMIT, ASKED - LIMIT), log.read_text()
    assert row.totals == (admitted + 1, admitted + 1), log.read_text()
