"""Test the table of docs/servers.md: on real servers, and on servers that refuse what hosted ones refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis
from django.conf import settings
from django.test import override_settings

from ratelimits.doctor.diagnosis import diagnose
from ratelimits.doctor.findings import Part
from ratelimits.embedded import EmbeddedServer
from tests.doctor.keyless import KeylessRefused
from tests.doctor.restrictions import HOSTED, USER, connected, settings_of_server, user
from tests.support.engine.proxy import Proxy
from tests.support.servers import TestServers, server_binary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "servers.md"


@pytest.mark.parametrize(
    "kind",
    ["valkey", "redis6", *(pytest.param(kind, marks=pytest.mark.system) for kind in ("redis7", "redis8"))],
)
def test_everything_works_on_each_kind_of_server(kind: str, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "s", aof=True, binary=server_binary(kind))
    try:
        with connected(server.url):
            (one,) = diagnose()
    finally:
        server.stop()
    assert one.findings == ()
    assert one.properties is not None
    version = ".".join(one.properties.version.split(".")[:2])
    assert f"| {one.properties.product} {version}" in PAGE.read_text()


def outcome(fence: str) -> str:
    """Return what the page says about a server with this fence."""
    with override_settings(RATELIMITS={**settings.RATELIMITS, "FENCE": fence}):
        (one,) = diagnose()
    failing = [part for part in Part if not one.works(part)]
    result = f"all but {', '.join(failing)}" if failing else "all works"
    return f'`"{fence}"`: {"nothing works" if len(failing) == len(Part) else result}'


@pytest.mark.slow
def test_the_emulated_rows_say_what_the_doctor_finds(redis_client: redis.Redis, servers: TestServers) -> None:
    listed = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    rows = {name: (first, second) for name, first, second in listed}
    differing = []
    for name, hosted in HOSTED.items():
        with (
            (KeylessRefused if hosted.keyless else Proxy)(servers.redis.port) as proxy,
            settings_of_server(redis_client, **hosted.settings),
            user(redis_client, "~*", "+@all", *hosted.denied.split()),
            connected(proxy.url, USER),
        ):
            found = outcome("aof"), outcome(hosted.fence)
        if rows.get(name) != found:
            differing.append(f"{name}: the page says {rows.get(name)}, the doctor {found}")
    assert differing == []
