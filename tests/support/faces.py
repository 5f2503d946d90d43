"""For tests of what stands in front of the engine: a process that knows nothing yet, and what was counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db.backends.utils import CursorWrapper
from django.test import override_settings

from ratelimits import rules
from ratelimits.conf import DEFAULTS
from ratelimits.engine.transport.breaker import Breaker
from ratelimits.quota import checking, process_totals
from ratelimits.quota.fallback import LocalLimiter
from ratelimits.quota.prefetch import give_back
from tests.support.raw import RawRedis


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def begin_afresh(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """As in a process that has just started; the clock is that of all that remembers."""
    clock = Clock()
    monkeypatch.setattr(checking, "breaker", Breaker(clock))
    monkeypatch.setattr(checking, "local", LocalLimiter(clock))
    monkeypatch.setattr(checking.denials, "clock", clock)
    give_back(everything=True)
    process_totals._begin()
    rules.forget()
    return clock


def counted(client: RawRedis) -> dict[str, int]:
    """All counters of all open batches: kind, meter, rule, account, key and what is counted, without moments."""
    out: dict[str, int] = {}
    for key in client.keys("*}:open"):
        for name, value in client.hgetall(key).items():
            if not name.startswith(b"#"):
                kind, _bin, _period, meter, rule, _version, account, who, what = name.decode().split("|")
                field = " ".join((kind, meter, rule, account or "-", who, what))
                out[field] = out.get(field, 0) + int(value)
    return out


@contextmanager
def queries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is asked of the database inside the block, by any thread; nothing is replaced, it is still asked."""
    seen: list[str] = []
    execute = CursorWrapper.execute

    def noted(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        seen.append(sql)
        return execute(self, sql, params)

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", noted)
        yield seen


def away(settings: Any, port: int) -> None:
    """The server of the limits is (or is not) at another port."""
    place = {**settings.CACHES["ratelimits"], "LOCATION": f"redis://127.0.0.1:{port}/0"}
    settings.CACHES = {**settings.CACHES, "ratelimits": place}


@contextmanager
def short_timeout() -> Iterator[None]:
    """A call of the server may take no longer than by default meanwhile: for a test that waits for one in vain."""
    with override_settings(RATELIMITS={**django_settings.RATELIMITS, "TIMEOUT": DEFAULTS["TIMEOUT"]}):
        yield
