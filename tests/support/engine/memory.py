"""Let the memory of a server be short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import pytest

from ratelimits.engine import memory, memory_watch
from tests.support.raw import RawRedis

#: Shares of `maxmemory` that lie in the middle of a level (see engine/memory.py), and one with which a server refuses.
NEAR, SHORT, FULL = 0.85, 0.95, 1.5


def shortage() -> memory.Shortage:
    """Return the level that this process knows."""
    return memory.level


def notice(share: float) -> None:
    """Let this process believe that a server uses this share of a GiB."""
    memory.note([memory.Use(ceil(share * 2**30), 2**30)])


def use_share(client: RawRedis, share: float) -> None:
    """Set `maxmemory` so that the server uses this share of it."""
    used = client.info("memory")["used_memory"] - client.info("memory")["mem_not_counted_for_evict"]
    client.config_set("maxmemory", int(used / share))


@contextmanager
def looking_by_hand(monkeypatch: pytest.MonkeyPatch, *clients: RawRedis) -> Iterator[None]:
    """Let only the test ask how much memory is used. At the end, the servers have enough memory."""
    monkeypatch.setattr(memory_watch._background, "_work", lambda: None)
    memory_watch._background.run()  # after what its thread was just doing
    memory.forget()
    try:
        yield
    finally:
        for client in clients:
            client.config_set("maxmemory", 0)
