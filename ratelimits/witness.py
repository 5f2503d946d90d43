"""What this process says for itself of requests that Redis did not count, or may not have: absolute totals.

The ledger holds what was decided and counted in one step. Two kinds of requests are not in it for certain: those whose
reply was lost ("unanswered") and those that the failure policy let through ("unmetered"). They are kept here until the
ledger wing has written them down, so that every report can state them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ratelimits.engine.call import nonce
from ratelimits.engine.keys import BIN_SECONDS

Kind = Literal["unanswered", "unmetered"]


@dataclass(frozen=True, slots=True)
class Place:
    """What a total is of: `bin` is the start of its 15 minutes by this machine's clock, seconds since 1970 UTC."""

    kind: Kind
    account: str
    key: str
    meter: str
    bin: int


_lock = threading.Lock()
_totals: dict[Place, tuple[int, int]] = {}
_process = ""
_pid = 0


def process() -> str:
    """A name that this process alone has; another one after a fork, which starts with totals of its own."""
    global _process, _pid
    if _pid != os.getpid():
        _pid, _process = os.getpid(), nonce()
    return _process


def _begin() -> None:
    global _lock
    _lock = threading.Lock()
    _totals.clear()


# In a child before it has threads: another one of its parent's may have held the lock just then.
os.register_at_fork(after_in_child=_begin)


def _count(kind: Kind, account: str, key: str, costs: Mapping[str, int]) -> None:
    start = int(time.time()) // BIN_SECONDS * BIN_SECONDS
    process()
    with _lock:
        for meter, cost in costs.items():
            place = Place(kind, account, key, meter, start)
            requests, units = _totals.get(place, (0, 0))
            _totals[place] = requests + 1, units + cost


def unanswered(account: str, key: str, costs: Mapping[str, int]) -> None:
    """A request whose decision was sent and never answered: it may have been counted or not."""
    _count("unanswered", account, key, costs)


def unmetered(account: str, key: str, costs: Mapping[str, int]) -> None:
    """A request that was let through without being counted."""
    _count("unmetered", account, key, costs)


def totals() -> dict[Place, tuple[int, int]]:
    """All totals of this process so far: requests and units by place. They only grow, so writing them is idempotent."""
    process()
    with _lock:
        return dict(_totals)
