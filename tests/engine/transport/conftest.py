from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django_redis.cache import RedisCache

from ratelimits.embedded import EmbeddedServer as RunningServer
from ratelimits.engine.transport.wire import Wire
from tests.support.engine.proxy import Proxy
from tests.support.engine.saying import PATIENT
from tests.support.garbage import collect_garbage
from tests.support.servers import TestServers, server_binary


@pytest.fixture
def opened() -> Iterator[Callable[..., Wire]]:
    """Open wires to a URL, with options of django-redis."""
    made: list[Wire] = []

    def open_wire(url: str, timeout: float = PATIENT, **options: Any) -> Wire:
        caches["wire"] = RedisCache(url, {"OPTIONS": options})
        try:
            made.append(Wire("wire", timeout))
        finally:
            del caches["wire"]
        return made[-1]

    yield open_wire
    for one in made:
        one.client.close()
        # The garbage collector may come to a socket before it comes to the connection that would have closed it.
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


@pytest.fixture
def own_server(servers: TestServers, tmp_path: Path) -> Iterator[RunningServer]:
    """Start a server that a test may stop and start."""
    running = RunningServer(tmp_path / "server", binary=server_binary(servers.redis_kind))
    yield running
    running.stop()
