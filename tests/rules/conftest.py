from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db.backends.signals import connection_created

from ratelimits.rules.loader import Loader


class Clock:
    """A clock that stands still until it is told otherwise, in seconds; read in µs."""

    def __init__(self, seconds: float = 1_800_000_000) -> None:
        self.seconds = seconds

    def __call__(self) -> int:
        return round(self.seconds * 1_000_000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loader(clock: Clock) -> Loader:
    """A process's loader that has read nothing yet."""
    return Loader(clock)


@pytest.fixture
def queries() -> Iterator[list[str]]:
    """The SQL that loaders ask, as it happens: they have a thread and a connection of their own."""
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
