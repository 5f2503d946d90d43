from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django_redis.cache import RedisCache
from django_redis.pool import ConnectionFactory

from ratelimits.embedded import EmbeddedServer as RunningServer
from ratelimits.engine.transport.wire import Wire
from tests.support.engine.askers import POOLS, Asker
from tests.support.engine.proxy import Proxy
from tests.support.engine.saying import PATIENT
from tests.support.garbage import collect_garbage
from tests.support.servers import TestServers, server_binary


@pytest.fixture
def opened() -> Iterator[Callable[..., Wire]]:
    """Open wires to a URL, with options of django-redis."""
    made: list[Wire] = []

    def open_wire(url: str, timeout: float = PATIENT, **options: Any) -> Wire:
        # django-redis stores pools by URL: without this, the options of the first wire would be those of all.
        pool_of_others = ConnectionFactory._pools.pop(url, None)
        caches["wire"] = RedisCache(url, {"OPTIONS": options})
        try:
            made.append(Wire("wire", timeout))
        finally:
            del caches["wire"]
            ConnectionFactory._pools.pop(url, None)
            if pool_of_others is not None:
                ConnectionFactory._pools[url] = pool_of_others
        return made[-1]

    yield open_wire
    for one in made:
        # The garbage collector may come to a socket before it comes to the connection that would have closed it.
        one._pool.disconnect()
        for owned in one._idle._idle if one._idle is not None else ():
            owned.connection.disconnect()
    made.clear()
    collect_garbage()


@pytest.fixture
def wire(opened: Callable[..., Wire], redis_url: str) -> Wire:
    return opened(redis_url)


@pytest.fixture
def proxy(servers: TestServers) -> Iterator[Proxy]:
    with Proxy(servers.redis.port) as running:
        yield running


@pytest.fixture(params=[*((name, False) for name in POOLS), ("plain", True)], ids=lambda one: f"{one[0]}-{one[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """Return the kind of pool, and whether the async functions ask."""
    made: tuple[str, bool] = request.param
    return made


@pytest.fixture
def asking(opened: Callable[..., Wire], kind: tuple[str, bool]) -> Callable[..., Asker]:
    """Return a function that opens a wire to a URL with options of its pool, and returns its asker."""
    name, is_async = kind

    def open_asker(url: str, timeout: float = PATIENT, **pool_kwargs: Any) -> Asker:
        options = {**POOLS[name], "CONNECTION_POOL_KWARGS": pool_kwargs}
        return Asker(opened(url, timeout, **options), is_async)

    return open_asker


@pytest.fixture
def own_server(servers: TestServers, tmp_path: Path) -> Iterator[RunningServer]:
    """Start a server that a test may stop and start."""
    running = RunningServer(tmp_path / "server", binary=server_binary(servers.redis_kind))
    yield running
    running.stop()
