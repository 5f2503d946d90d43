"""Count requests in this process. Reports compare these totals with the ledger, which has the usage counted by Redis.

There are nine kinds of totals:

admitted    requests that Redis admitted, by account. The ledger must contain at least these requests
unanswered  requests whose reply was lost, by key. It is not known whether the ledger contains them
unmetered   requests that a failure policy let through, by key. The ledger does not contain them
unreported  requests that spent prefetched permits, but are perhaps not counted, by key
uncounted   refused requests that are perhaps not counted as denied, by key (see deny_cache.py)
blocked     requests that a block refused, by the key or network of the block
exempt      requests that an allow exempted, by the key or network of the allow
unreadable  requests whose user or API key cannot be read, by "user" or "api_key". The status page shows them
undecided   requests that a failure policy refused, because there was no decision. The status page shows them

A thread writes to the database, every PROCESS_TOTALS_INTERVAL seconds and when the process ends. It writes only the
totals that have grown. It writes unanswered, unmetered, unreported and uncounted requests at once, so that every report
can state them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.background import Background
from ratelimits.conf import conf
from ratelimits.engine.call import new_nonce
from ratelimits.engine.keys import BIN_SECONDS, ledger_name
from ratelimits.quota.counting import Kind

Totals = dict["TotalKey", tuple[int, int]]

#: Each bin (15 minutes) has its own totals. These totals stay in memory for this number of seconds after the
#: end of the bin, because a request of the bin can be counted late.
_KEPT_SECONDS = 2 * BIN_SECONDS
#: The kinds of requests that are recorded nowhere else. The process can end at any time, so write their totals at once.
_AT_ONCE = frozenset({"unanswered", "unmetered", "unreported", "uncounted"})


class TotalKey(NamedTuple):
    """The things that a total counts, and the bin in which it counts them.

    account  the account without "account:"; "" for requests without an account
    key  the counted key; "" for the kind "admitted"
    bin  start of the bin (15 minutes), in seconds since 1970 UTC
    """

    kind: Kind
    account: str
    key: str
    meter: str
    bin: int


_lock = threading.Lock()
#: Each value is a list: requests, units, written requests, written units.
_totals: dict[TotalKey, list[int]] = {}
#: Maximum number of totals that stay in memory after a write. If there are more, the process forgets all written totals
#: and continues under a new process name.
MAX_WRITTEN = 50_000
#: Maximum number of totals. When it is reached, no new total is made for admitted requests. A request of another kind
#: that would need a new total is added to a shared total. Each kind, meter and bin has one shared total.
MAX_UNWRITTEN = 200_000
#: Admitted requests that are not added to the totals yet: account, costs, moment (µs since 1970 UTC).
_new_admissions: deque[tuple[str | None, Mapping[str, int], int]] = deque()
#: When `_new_admissions` has this number of items, they are added to the totals.
_MAX_NEW_ADMISSIONS = 10_000
#: Length of a bin in µs.
_BIN = BIN_SECONDS * MICROSECONDS
#: Totals of bins that began before this moment (seconds since 1970 UTC) were written and forgotten.
_forgotten_before = 0
#: The name of this process, and the id of the process to which this name belongs.
_process = ""
_pid = 0
#: The function that stores totals.
_write: Callable[[str, Totals], None] | None = None
#: Functions of other modules that add their counts. They are called each time before the totals are read.
_adders: list[Callable[[], None]] = []


def process() -> str:
    """Return the unique name of this process. A forked child has its own name and its own totals."""
    global _process, _pid
    if _pid != os.getpid():
        _pid, _process = os.getpid(), new_nonce().decode()
    return _process


def _forget_all() -> None:
    """Forget all totals, and make a new lock."""
    global _lock, _forgotten_before
    _lock, _forgotten_before = threading.Lock(), 0
    _totals.clear()
    _new_admissions.clear()


# Make a new lock in a forked child: perhaps a thread of the parent held the old lock at the fork.
os.register_at_fork(after_in_child=_forget_all)


def _add(total_key: TotalKey, cost: int, requests: int = 1) -> None:
    """Add requests that have the same cost to a total. The caller must hold the lock."""
    total = _totals.get(total_key)
    if total is None:
        if len(_totals) >= MAX_UNWRITTEN:
            if total_key.kind == "admitted":
                return  # Reports check only that the ledger has at least these requests, so a lower total is safe.
            total_key = total_key._replace(account="", key="anonymous")
        total = _totals.setdefault(total_key, [0, 0, 0, 0])
    total[0] += requests
    total[1] += cost * requests


def add(
    kind: Kind, account: str, key: str, costs: Mapping[str, int], requests: int = 1, bin_start: int | None = None
) -> None:
    """Count several requests that have the same costs. Start the thread that writes the totals.

    `bin_start` is the start of their bin, in seconds since 1970 UTC; None for the present bin.
    """
    if bin_start is None:
        bin_start = int(time.time()) // BIN_SECONDS * BIN_SECONDS
    with _lock:
        # If the clock steps back, do not count in a bin whose totals were written and forgotten.
        bin_start = max(bin_start, _forgotten_before)
        for meter, cost in costs.items():
            _add(TotalKey(kind, ledger_name(account), ledger_name(key), ledger_name(meter), bin_start), cost, requests)
    start()
    if kind in _AT_ONCE:
        _background.wake()


def before_totals(add_more: Callable[[], None]) -> None:
    """Call `add_more` each time before totals are read. `add_more` calls `add` for requests that its module counted."""
    _adders.append(add_more)


def start() -> None:
    """Start the thread that writes the totals."""
    if not _background.running:
        _start()


def admitted(account: str | None, costs: Mapping[str, int], now: int) -> None:
    """Count a request that Redis admitted at `now` (µs since 1970 UTC). `account` has the form "account:7".

    The caller must not change `costs` later.
    """
    # This function runs for every request. To append an item is fast and needs no lock.
    _new_admissions.append((account, costs, now))
    if len(_new_admissions) >= _MAX_NEW_ADMISSIONS:
        _add_up()
    if not _background.running:
        _start()


def _add_up() -> None:
    """Add the admitted requests, and the requests that other modules have counted, to the totals."""
    for add_more in _adders:
        add_more()
    with _lock:
        # Requests with the same prepared command have the same mapping of costs. So first count the requests with the
        # same account, mapping and bin, and then add each count to the totals at once.
        counts: dict[tuple[str | None, int, int], int] = {}
        mappings: dict[int, Mapping[str, int]] = {}
        for _ in range(len(_new_admissions)):
            account, costs, now = _new_admissions.popleft()
            mappings[id(costs)] = costs
            group = account, id(costs), now // _BIN
            counts[group] = counts.get(group, 0) + 1
        for (account, costs_id, bin_number), requests in counts.items():
            start = max(bin_number * BIN_SECONDS, _forgotten_before)
            owner = (account or "").removeprefix("account:")
            for meter, cost in mappings[costs_id].items():
                _add(TotalKey("admitted", ledger_name(owner), "", ledger_name(meter), start), cost, requests)


def totals() -> Totals:
    """Return the totals of this process: for each TotalKey the number of requests and of units."""
    _add_up()
    with _lock:
        return {total_key: (requests, units) for total_key, (requests, units, *_written) in _totals.items()}


def _grown() -> Totals:
    """Return the totals that have grown since they were last written."""
    _add_up()
    with _lock:
        return {
            total_key: (requests, units)
            for total_key, (requests, units, written_requests, _written_units) in _totals.items()
            if requests != written_requests
        }


def write_with(write: Callable[[str, Totals], None]) -> None:
    """Set the function that stores totals. It is called with the process' name and the totals."""
    global _write
    _write = write


def write() -> None:
    """Write the totals that have grown, and forget written totals of old bins."""
    global _forgotten_before
    name, grown = process(), _grown()
    if _write is None:
        return
    if grown:
        _write(name, grown)
    forget_before = int(time.time()) // BIN_SECONDS * BIN_SECONDS - _KEPT_SECONDS
    with _lock:
        for total_key, counts in grown.items():
            if total_key in _totals:  # perhaps another thread has forgotten it
                _totals[total_key][2:] = counts  # the written requests and units
        old_and_written = [
            total_key
            for total_key, (requests, _units, written_requests, _written_units) in _totals.items()
            if total_key.bin < forget_before and requests == written_requests
        ]
        for total_key in old_and_written:
            del _totals[total_key]
            _forgotten_before = max(_forgotten_before, total_key.bin + BIN_SECONDS)
        if len(_totals) > MAX_WRITTEN:
            _rename()


def _rename() -> None:
    """Continue under a new process name. Of each total keep only the part that is not written yet."""
    global _process
    _process = new_nonce().decode()
    for total_key, (requests, units, written_requests, written_units) in list(_totals.items()):
        if requests == written_requests:
            del _totals[total_key]
        else:
            _totals[total_key] = [requests - written_requests, units - written_units, 0, 0]


def _start() -> None:
    if _write is None or not _background.allowed:
        return
    if conf.PROCESS_TOTALS_INTERVAL > 0:
        _background.start()
        return
    with _lock:  # Nobody will read these totals, so do not keep them.
        _new_admissions.clear()
        _totals.clear()


_background = Background(
    "ratelimits-process-totals", lambda: conf.PROCESS_TOTALS_INTERVAL, write, end_order=1, writes_rows=True
)
