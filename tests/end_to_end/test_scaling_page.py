"""Use the configurations of docs/scaling.md, with the addresses of the test's own servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import override_settings
from django_redis.pool import ConnectionFactory

from ratelimits import engine
from ratelimits.conf import conf
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.server import current_server
from ratelimits.usage.models import Line
from tests.support.cluster import Cluster
from tests.support.engine.asking import limit, usage
from tests.support.sentinel import Watched
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scaling.md").read_text()
pytestmark = pytest.mark.django_db(transaction=True)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@contextmanager
def configured(text: str, addresses: dict[str, str]) -> Iterator[None]:
    """Use the page's CACHES with the addresses of the test."""
    for old, new in addresses.items():
        assert old in text
        text = text.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(text, "docs/scaling.md", "exec"), names)
    (alias,) = names["CACHES"].values()
    with override_settings(CACHES={conf.CACHE_ALIAS: alias}):
        yield


def serve() -> None:
    """Make requests of several accounts, under limits of one shard and of several; bring their usage to the ledger."""
    accounts = [f"account-{number}" for number in range(6)]
    for account in accounts:
        limits = [limit(key="user:1"), limit(key="ip:192.0.2.1")]
        assert engine.decide(limits, account=account, usage=usage(account=account)).allowed
    flow()
    assert sorted(Line.objects.values_list("account", flat=True)) == accounts


def test_every_block_of_the_page_is_tried_here() -> None:
    assert len(re.findall(r"^```\w+", PAGE, re.MULTILINE)) == len(blocks("python")) + len(blocks("conf")) == 3


def test_sentinel(servers: TestServers, tmp_path: Path) -> None:
    text, _cluster = blocks("python")
    watched = Watched(tmp_path, server_binary(servers.redis_kind))
    try:
        for port in (watched.servers[0].port, watched.servers[1].port):
            with redis.Redis(port=port) as client:
                for line in blocks("conf")[0].splitlines()[1:]:
                    client.config_set(*line.split())
        here = f'"127.0.0.1", {watched.port}'
        with configured(text, {f'"10.0.0.{number}", 26379': here for number in (1, 2, 3)}):
            serve()
            current_server().wire.client.close()
    finally:
        for url in [url for url in ConnectionFactory._pools if url.startswith("redis://quota/")]:
            ConnectionFactory._pools.pop(url).disconnect()
        watched.stop()


def test_cluster(servers: TestServers, tmp_path: Path) -> None:
    _sentinel, text = blocks("python")
    cluster = Cluster(tmp_path, server_binary(servers.redis_kind))
    try:
        with configured(text, {"redis://10.0.0.1:6379/0": cluster.url}):
            assert isinstance(current_server().wire, ClusterWire)
            serve()
    finally:
        cluster.stop()
