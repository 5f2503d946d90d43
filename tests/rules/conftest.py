from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db.backends.signals import connection_created

from ratelimits.rules.loader import Loader


class Clock:
    """A clock that moves only when the test says so. It is set in seconds and read in µs."""

    def __init__(self, seconds: float = 1_800_000_000) -> None:
        self.seconds = seconds

    def __call__(self) -> int:
        return round(self.seconds * 1_000_000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loader(clock: Clock) -> Loader:
    """Return the loader of a process that has read nothing yet."""
    return Loader(clock)


@pytest.fixture
def queries() -> Iterator[list[str]]:
    """Return a list that fills with the SQL of loaders, which have their own thread and connection."""
    asked: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        asked.append(sql)
        return execute(sql, params, many, context)

    def watch(connection: Any, **kwargs: Any) -> None:
        if threading.current_thread().name.startswith("ratelimits-rules"):
            connection.execute_wrappers[:] = [note]

    connection_created.connect(watch)
    yield asked
    connection_created.disconnect(watch)
