"""Test the whole way of requests and usage over a Unix socket, over TLS, as a user with few rights, on each server."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis
from django.db.models import Sum
from django.test import override_settings
from django_redis.pool import ConnectionFactory

from ratelimits import engine, rules
from ratelimits.algorithms.limits import Concurrency, TokenBucket
from ratelimits.answers.answer import Answer
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.call import shard
from ratelimits.engine.server import breaker, current_server
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.outbound import permits
from ratelimits.quota import checking, from_memory
from ratelimits.quota.receipts import refund, settle
from ratelimits.simulate.trial import try_rule
from ratelimits.status import operating
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.usage.models import Line
from tests.support.engine.asking import limit
from tests.support.engine.proxy import Proxy
from tests.support.engine.tls import TlsServer
from tests.support.eventually import until
from tests.support.rows import NEEDED, rule
from tests.support.servers import server_binary
from tests.support.usage.traffic import NOON, flow

pytestmark = pytest.mark.django_db(transaction=True)

SCALING = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
WHO = Identity("user:1", None, "account:acme", "ip:203.0.113.9")


class Request:
    """A request with an answer, as a view sees it."""

    def __init__(self, answer: Answer) -> None:
        self.quota = answer


def everything() -> None:
    """Decide by each algorithm, sync and async; edit, settle, refund, reset, watch; bring the usage to the ledger."""
    rules.forget()
    for algorithm in NEEDED:
        rule(algorithm.replace("_", "-"), algorithm, scope=algorithm, key_kind="user")
    answers = []
    for algorithm in NEEDED:
        answers += [checking.check(WHO, algorithm), asyncio.run(checking.acheck(WHO, algorithm))]
    assert all(one.decision is not None for one in answers)
    Rule.objects.filter(name="token-bucket").update(capacity=1)
    answers += [checking.check(WHO, "token_bucket") for _ in range(3)]
    assert (answers[-1].decision is not None, answers[-1].allowed) == (True, False)
    from_memory.sender.flush()
    true, refunded = (Request(checking.check(WHO, "fixed_window")) for _ in range(2))
    assert settle(true, {"requests": 3}) is not None
    assert refund(refunded) is not None
    assert operating.reset("user:1", "fixed-window", "a test", account="acme").pk
    assert operating.counted_under("user:1", "fixed-window", account="acme")
    assert {fact.name: fact.level for fact in facts()}["redis"] == Level.GREEN
    flow()
    units = Line.objects.aggregate(units=Sum("admitted_units") - Sum("refunded_units"))["units"]
    assert units == sum(one.allowed for one in answers) + 3
    wait_for_a_lease()
    reset_the_only_limit_of_a_key()
    bursts, _overload = try_rule(current_server().wire, TokenBucket(10, Decimal(5), Decimal(1)), None, NOON)
    assert (bursts.requested, bursts.admitted) == (120, 35)


def reset_the_only_limit_of_a_key() -> None:
    """Reset a limit after which nothing is left of its Redis key, and one whose state cannot be read."""
    limit = engine.Limit(key="ip:198.51.100.7", algorithm=TokenBucket(1, Decimal(1), Decimal(3600)))
    server = current_server()
    for spoil in (False, True):
        assert engine.decide([limit]).allowed
        if spoil:
            state = server.keyspace.state(shard(server.keyspace, limit.key, ""), limit.key)
            server.wire.client.set(state, "nothing that can be read", keepttl=True)
        engine.reset([limit])
    assert engine.decide([limit]).allowed


def wait_for_a_lease() -> None:
    """Let an outbound call wait until another one releases its lease."""
    limit = Concurrency(1, Decimal(3600))
    client: Any = current_server().wire.client

    def wait() -> float:
        with permits("jobs", rate=limit) as permit:
            return permit.waited

    with ThreadPoolExecutor(1) as pool:
        with permits("jobs", rate=limit):
            waited = pool.submit(wait)
            until(lambda: client.info("clients")["blocked_clients"] == 1, "a call waits")
        assert waited.result(30) > 0


def using(location: str, **options: Any) -> Any:
    """Point the app's cache aliases to a server."""
    place = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}
    return override_settings(CACHES={"ratelimits": place, "default": place})


def documented_rights() -> list[str]:
    """Return the rights of the user that docs/scaling.md describes, as `ACL SETUSER` takes them."""
    found = re.search(r"^ACL SETUSER ratelimits (.*?)\n```", SCALING.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "docs/scaling.md has no ACL SETUSER"
    return found[1].replace("\\\n", " ").replace("<namespace>", "test").split()


@pytest.fixture(
    params=["valkey", "redis6", *(pytest.param(kind, marks=pytest.mark.system) for kind in ("redis7", "redis8"))]
)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Start a server that also listens on a Unix socket."""
    options = {"appendfsync": "always", "unixsocket": "redis.sock"}
    running = EmbeddedServer(tmp_path / "s", aof=True, binary=server_binary(request.param), options=options)
    known = set(ConnectionFactory._pools)
    yield running
    current_server().wire.client.close()
    for url in set(ConnectionFactory._pools) - known:
        ConnectionFactory._pools.pop(url).disconnect()
    running.stop()
    rules.forget()


def test_over_a_unix_socket(server: EmbeddedServer) -> None:
    with using(f"unix://{server.directory / 'redis.sock'}?db=0"):
        everything()


def test_on_a_server_that_knows_only_resp_3(server: EmbeddedServer) -> None:
    with Proxy(server.port) as proxy:
        proxy.first = b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n"
        with using(proxy.url, CONNECTION_POOL_KWARGS={"protocol": 3}):
            everything()
            current_server().wire.client.close()


def test_a_user_with_the_documented_rights_can_do_everything(server: EmbeddedServer) -> None:
    with redis.Redis(port=server.port) as admin:
        admin.execute_command("ACL", "SETUSER", "ratelimits", *documented_rights())
        admin.execute_command("ACL", "SETUSER", "default", "off")
        with using(server.url.replace("redis://", "redis://ratelimits:secret@")):
            everything()
        # redis-py sends CLIENT SETINFO, and works without it.
        denied = {entry[b"object"] for entry in admin.execute_command("ACL", "LOG")}
        assert denied <= {b"client", b"client|setinfo"}


def test_that_user_may_touch_no_other_keys_and_delete_nothing_else(server: EmbeddedServer) -> None:
    with redis.Redis(port=server.port) as admin:
        admin.execute_command("ACL", "SETUSER", "ratelimits", *documented_rights())
    with redis.Redis(port=server.port, username="ratelimits", password="secret") as client:
        for command in (("GET", "other"), ("FLUSHALL",), ("CONFIG", "SET", "save", ""), ("KEYS", "*"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


@pytest.mark.system
def test_over_tls_on_redis_7(tmp_path: Path) -> None:
    """The server's certificate is checked: without it, nothing is sent."""
    with TlsServer(tmp_path) as server:
        with using(server.url):
            assert checking.check(WHO).decision is None
        ConnectionFactory._pools.pop(server.url).disconnect()
        breaker.succeeded()
        with using(server.url, CONNECTION_POOL_KWARGS=server.pool_kwargs):
            everything()
            current_server().wire.client.close()
        ConnectionFactory._pools.pop(server.url).disconnect()
    rules.forget()


@pytest.mark.system
def test_a_cluster_over_tls(tmp_path: Path) -> None:
    factory = "ratelimits.django_redis_cluster.ConnectionFactory"
    with TlsServer(tmp_path, {"cluster-enabled": "yes", "tls-cluster": "yes"}) as server:
        with redis.Redis(port=server.server.port) as admin:
            admin.cluster("ADDSLOTSRANGE", 0, 16383)
            until(lambda: admin.cluster("INFO")["cluster_state"] == "ok", "the node serves its slots")
        kwargs = {**server.pool_kwargs, "ssl_min_version": ssl.TLSVersion.TLSv1_3}
        with using(server.url, CONNECTION_FACTORY=factory, CONNECTION_POOL_KWARGS=kwargs):
            for ask in (
                lambda: engine.decide([limit()], account="acme"),
                lambda: asyncio.run(engine.adecide([limit()], account="acme")),
            ):
                assert ask().allowed
            wire: Any = current_server().wire
            (node,) = wire._nodes.values()
            (owned,) = node._idle._idle
            assert owned.connection._sock.version() == "TLSv1.3"
            assert owned.connection.ssl_min_version == ssl.TLSVersion.TLSv1_3
            wire.client.close()
