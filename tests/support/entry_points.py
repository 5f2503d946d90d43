"""For tests of the entry points: forget what this process remembers, and read the usage that was counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db.backends.utils import CursorWrapper

from ratelimits import rules
from ratelimits.conf import DEFAULTS
from ratelimits.engine.server import breaker
from ratelimits.quota import from_memory, spending, without_decision
from ratelimits.quota.without_decision import LocalLimiter
from ratelimits.usage.counting import process_totals
from tests.support.raw import RawRedis


class Clock:
    """A clock that moves only when the test says so, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def begin_afresh(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Forget everything that this process remembers, and return the clock that it uses from now on.

    Only the test counts the requests that spent prefetched permits, because a thread would do it at any moment.
    """
    clock = Clock()
    monkeypatch.setattr(spending._background, "_work", lambda: None)
    own_breaker(monkeypatch, clock)
    monkeypatch.setattr(without_decision, "local", LocalLimiter(clock))
    monkeypatch.setattr(from_memory.denials, "clock", clock)
    spending.clear()
    process_totals._forget_all()
    rules.forget()
    return clock


def own_breaker(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float] = time.monotonic) -> None:
    """Let the process's breaker have this clock, and no thread: one call tries again after each pause."""
    breaker.succeeded()
    monkeypatch.setattr(breaker, "_clock", clock)
    monkeypatch.setattr(breaker, "_probe", None)


def counted(client: RawRedis) -> dict[str, int]:
    """Return all counters of all open batches, by their field names without times and versions."""
    out: dict[str, int] = {}
    for key in client.keys("*}:open"):
        for name, value in client.hgetall(key).items():
            if not name.startswith(b"#"):
                kind, _bin, meter, rule, _version, account, who, what = name.decode().split("|")
                field = " ".join((kind, meter, rule, account or "-", who, what))
                out[field] = out.get(field, 0) + int(value)
    return out


@contextmanager
def queries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the queries of all threads inside the block; the database still runs them."""
    seen: list[str] = []
    execute = CursorWrapper.execute

    def noted(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        seen.append(sql)
        return execute(self, sql, params)

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", noted)
        yield seen


def away(settings: Any, port: int) -> None:
    """Let the app look for the server of the limits at another port, where no server answers."""
    place = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{port}/0"}
    settings.CACHES = {**settings.CACHES, "ratelimits": place}


@contextmanager
def short_timeout(settings: Any) -> Iterator[None]:
    """Use the short default TIMEOUT in the block, for a test in which a call gets no answer.

    pytest's `settings` undoes its changes at the end of the test. `override_settings` in the block would undo them in
    the wrong order.
    """
    usual = settings.RATELIMITS["TIMEOUT"]
    settings.RATELIMITS = {**settings.RATELIMITS, "TIMEOUT": DEFAULTS["TIMEOUT"]}
    yield
    settings.RATELIMITS = {**settings.RATELIMITS, "TIMEOUT": usual}
