"""Record the requests of some accounts and keys. A thread writes them to the database.

`RECORD_SAMPLE` is the share of the accounts, and of the keys without an account, that are recorded. A hash chooses
them, so all processes choose the same accounts and keys. All requests of a chosen account or key are recorded. So a
trial of a rule on these requests gives the decisions that the rule would have made.

A request is first added to a queue in memory. If a process is killed, the requests of its last `INTERVAL` seconds are
lost.
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
from ratelimits.recording import trace

if TYPE_CHECKING:
    from ratelimits.identity import Identity

#: Seconds between two writes.
INTERVAL = 5.0
#: Maximum length of the queue. While the queue is full, further requests are only counted.
MAX_UNWRITTEN = 20_000
#: If the queue has this length, the thread writes at once.
_WAKE_LENGTH = 5_000

_unwritten: deque[trace.UnwrittenRequest] = deque()
#: How many requests were lost or left out since the last successful write.
_left_out = 0
_lock = threading.Lock()


def in_sample(owner: str, share: float) -> bool:
    """Return whether an account, or a key without an account, is recorded.

    `share` (0 to 1) is the share of the accounts and keys that are recorded.
    """
    return crc32(owner.encode()) < share * 2**32  # a CRC-32 is a number below 2**32


def record(identity: Identity, scope: str, method: str, costs: Mapping[str, int], *, refused: bool) -> None:
    """Record a request, if its account or key is in the sample. The caller must check that `RECORD_SAMPLE` is not 0.

    `refused` says whether the request was refused, by a rule, a block or a failure policy.
    """
    owner = identity.account or identity.narrowest_key or identity.address or ""
    if not in_sample(owner, conf.RECORD_SAMPLE):
        return
    unwritten = len(_unwritten)
    if unwritten < MAX_UNWRITTEN:
        # Appending to a deque needs no lock. The costs are copied, because the view can change its mapping later.
        _unwritten.append((time.time_ns() // 1000, identity, scope, method, dict(costs), refused))
        if unwritten == _WAKE_LENGTH:
            _background.wake()
    else:
        _leave_out(1)
    if not _background.running:
        _background.start()


def _leave_out(requests: int) -> None:
    global _left_out
    with _lock:
        _left_out += requests


def write() -> None:
    """Write the requests of the queue to the database.

    If this fails, the requests are lost. The next write records how many were lost.
    """
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
    """Empty the queue. A forked process does this, because the requests in its queue belong to its parent."""
    global _lock, _left_out
    _lock, _left_out = threading.Lock(), 0
    _unwritten.clear()


# `end_order`: when the process ends, threads with lower numbers do their last work earlier.
_background = Background("ratelimits-recorder", lambda: INTERVAL, write, end_order=4, writes_rows=True)
os.register_at_fork(after_in_child=clear)
