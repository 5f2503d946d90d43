from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from ratelimits import rules
from tests.chaos.compared import CAPACITY, RATE
from tests.chaos.load import FLOOD, TIGHT, TIMEOUT, WIDE
from tests.chaos.row import Hanging, Row, write
from tests.support.rows import rule
from tests.support.servers import TestServers

#: The setting TIMEOUT in the sample, which may run on a busy machine.
PATIENT = 10


def _collected(config: pytest.Config, table: str) -> Iterator[Callable[[Row | Hanging], None]]:
    """Yield a function that prints and collects lines. With `--reliability`, write them into a page at the end."""
    lines: list[dict[str, str]] = []

    def add(row: Row | Hanging) -> None:
        print(f"\n{row}")
        lines.append(row.cells)

    yield add
    page: str | None = config.option.reliability
    if page and lines:
        write(Path(page), table, lines)


@pytest.fixture(scope="session")
def reliability(pytestconfig: pytest.Config) -> Iterator[Callable[[Row], None]]:
    """Return a function that takes the row of a fault."""
    yield from _collected(pytestconfig, "faults")


@pytest.fixture(scope="session")
def hanging(pytestconfig: pytest.Config) -> Iterator[Callable[[Hanging], None]]:
    """Return a function that takes what a server that hangs adds to requests."""
    yield from _collected(pytestconfig, "hanging")


@pytest.fixture
def quick_settings(settings: Any, long_run: bool) -> None:
    """Give up soon, repeat no refusals, and read the rules every second."""
    settings.RATELIMITS = {
        **settings.RATELIMITS,
        "TIMEOUT": TIMEOUT if long_run else PATIENT,
        "DENY_CACHE_SECONDS": 0,
        "RELOAD_INTERVAL": 1,
    }


@pytest.fixture
def process_environment(servers: TestServers, settings: Any, quick_settings: None) -> Callable[[], dict[str, str]]:
    """Return a function that makes the environment of the load's other processes from the present settings."""

    def environment() -> dict[str, str]:
        # These processes write what they count to the database, as web workers do.
        values = {"CACHES": settings.CACHES, "RATELIMITS": {**settings.RATELIMITS, "PROCESS_TOTALS_INTERVAL": 1}}
        return {
            **os.environ,
            "DATABASE_URL": servers.url_of_database(str(connection.settings_dict["NAME"])),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "CHAOS_SETTINGS": json.dumps(values),
        }

    return environment


@pytest.fixture
def load_rules(transactional_db: None) -> Iterator[None]:
    """Make the rules of the load."""
    rules.forget()
    rule(TIGHT, capacity=CAPACITY, rate=RATE, period=1, scope=TIGHT, key_kind="global", on_failure="deny")
    rule(WIDE, capacity=1_000_000, rate=1_000_000, period=1, scope=WIDE, key_kind="user", on_failure="allow")
    rule("hourly", "calendar_window", calendar_unit="hour", capacity=1_000_000, scope=WIDE, on_failure="allow")
    rule("flood", "fixed_window", capacity=100, period=3600, scope=FLOOD, key_kind="ip", on_failure="allow")
    rule("storm", capacity=1_000_000, rate=1_000_000, period=1, scope=WIDE, on_failure="allow")
    yield
    rules.forget()
