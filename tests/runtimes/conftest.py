from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import environment as environment
from tests.runtimes.row import Row, write
from tests.support.engine.proxy import Proxy
from tests.support.servers import TestServers


@pytest.fixture
def proxy(servers: TestServers) -> Iterator[Proxy]:
    """Stand between the processes of a runtime and the server of the limits."""
    with Proxy(servers.redis.port) as proxy:
        yield proxy


@pytest.fixture
def surroundings(environment: dict[str, str], proxy: Proxy, tmp_path: Path) -> dict[str, str]:
    """Return the environment of the processes of a runtime."""
    return {
        **environment,
        "DJANGO_SETTINGS_MODULE": "tests.support.runtimes.settings",
        "LIMITS_URL": proxy.url,
        "HELD": str(tmp_path / "held"),
        "RELEASE": str(tmp_path / "release"),
        # A process that waits for a reply that is held back must not give up.
        "RATELIMITS_TIMEOUT": "60",
    }


@pytest.fixture(scope="session")
def runtime_rows(pytestconfig: pytest.Config) -> Iterator[list[Row]]:
    """Collect the rows of all runtimes. With `--runtimes`, write them into a page at the end."""
    rows: list[Row] = []
    yield rows
    page: str | None = pytestconfig.option.runtimes
    if page:
        write(Path(page), rows)
