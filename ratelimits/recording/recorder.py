"""Record the requests of some accounts and keys. A thread writes them to the database.

RECORD_SAMPLE is the share of accounts that are recorded, or of keys that have no account. A hash chooses them, so all
processes choose the same ones, and every request of a chosen one is recorded. So a rule that counts such a key can be
replayed as it would have decided.

A request is only appended to a queue in memory. If a process ends without warning, at most the requests of its last
INTERVAL seconds are lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING
from zlib import crc32

from ratelimits.background import Background
from ratelimits.conf import conf
from ratelimits.models.testcase import tests
from ratelimits.recording import trace

if TYPE_CHECKING:
    from ratelimits.identity import Identity

#: Seconds between two writes.
INTERVAL = 5.0
#: Maximum number of requests that wait to be written. Further requests are only counted.
MAX_UNWRITTEN = 20_000
#: From this number of waiting requests on, the thread does not wait for its next interval.
_MANY = 5_000

_unwritten: deque[trace.Recorded] = deque()
_left_out = 0
_lock = threading.Lock()


def in_sample(owner: str, share: float) -> bool:
    """Return whether an account, or a key without an account, belongs to this share (0 to 1) of all of them."""
    return crc32(owner.encode()) < share * 2**32


def record(identity: Identity, scope: str, method: str, costs: Mapping[str, int]) -> None:
    """Record a request, if its account or key is in the sample. The caller has checked that RECORD_SAMPLE is not 0."""
    owner = identity.account or identity.narrowest or identity.address or ""
    if not in_sample(owner, conf.RECORD_SAMPLE):
        return
    unwritten = len(_unwritten)
    if unwritten < MAX_UNWRITTEN:
        # Appending needs no lock. Copy the mapping: the view may change it later.
        _unwritten.append((time.time_ns() // 1000, identity, scope, method, dict(costs)))
        if unwritten == _MANY:
            _background.wake()
    else:
        _leave_out(1)
    if not _background.running:
        _start()


def _leave_out(requests: int) -> None:
    global _left_out
    with _lock:
        _left_out += requests


def write() -> None:
    """Write the requests that wait. If this fails, they are lost; the next write says how many."""
    global _left_out
    requests = [_unwritten.popleft() for _ in range(len(_unwritten))]
    if not requests:
        return
    with _lock:
        left_out, _left_out = _left_out, 0
    try:
        trace.write(requests, left_out)
    except BaseException:
        _leave_out(left_out + len(requests))
        raise


def clear() -> None:
    """Forget the requests that wait. A forked process does this, since they belong to its parent."""
    global _lock, _left_out
    _lock, _left_out = threading.Lock(), 0
    _unwritten.clear()


def _start() -> None:
    # Do not start in tests: the thread would write into a database that a test empties, or into the project's real one.
    if not tests.possible:
        _background.start()


_background = Background("ratelimits-recorder", lambda: INTERVAL, write, turn=4)
os.register_at_fork(after_in_child=clear)
