"""The totals that this process counts itself, with which reports cross-check the ledger.

"admitted" counts what the server admitted, by account alone: the ledger must have at least that. Two kinds of requests
may be missing from the ledger, and are counted by key: "unanswered" requests, whose reply was lost, and "unmetered"
ones, which the failure policy let through. "blocked" and "exempt" count what blocks refused and allows let through, by
the key or network of the row. A thread writes the totals that have grown every PROCESS_TOTALS_INTERVAL
seconds and when the process ends. It writes unanswered and unmetered ones at once, so that every report can state them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.background import Background
from ratelimits.conf import conf
from ratelimits.engine.call import nonce
from ratelimits.engine.keys import BIN_SECONDS, ledger_name
from ratelimits.models.testcase import tests

Kind = Literal["admitted", "unanswered", "unmetered", "blocked", "exempt"]
Totals = dict["TotalKey", tuple[int, int]]

#: This many seconds after a bin its totals are complete. Once they are written they are forgotten.
_KEPT = 2 * BIN_SECONDS


class TotalKey(NamedTuple):
    """What a total counts. `bin` is the start of its 15 minutes by this machine's clock, in seconds since 1970 UTC.

    `key` is "" for the kind "admitted".
    """

    kind: Kind
    account: str
    key: str
    meter: str
    bin: int


_lock = threading.Lock()
#: By key: requests, units, written requests, written units.
_totals: dict[TotalKey, list[int]] = {}
#: Beyond this many totals, once all are written, the process starts again with none, under another name.
MAX_WRITTEN = 50_000
#: Maximum number of totals while they cannot be written. Beyond it, new accounts are counted together.
MAX_UNWRITTEN = 200_000
#: Admitted requests that are not added to the totals yet.
_granted: deque[tuple[str | None, Mapping[str, int], int]] = deque()
_MAX_GRANTED = 10_000
_forgotten = 0
_process = ""
_pid = 0
_write: Callable[[str, Totals], None] | None = None
_adders: list[Callable[[], None]] = []


def process() -> str:
    """Return the unique name of this process. A forked child has another name, and totals of its own."""
    global _process, _pid
    if _pid != os.getpid():
        _pid, _process = os.getpid(), nonce().decode()
    return _process


def _begin() -> None:
    global _lock, _forgotten
    _lock, _forgotten = threading.Lock(), 0
    _totals.clear()
    _granted.clear()


# Make a new lock in a forked child: a thread of its parent may have held the old one.
os.register_at_fork(after_in_child=_begin)


def _add(total_key: TotalKey, cost: int, requests: int = 1) -> None:
    total = _totals.get(total_key)
    if total is None:
        if len(_totals) >= MAX_UNWRITTEN:
            if total_key.kind == "admitted":
                return  # the ledger must have at least these totals, so it is safe to leave some out
            total_key = total_key._replace(account="", key="anonymous")
        total = _totals.setdefault(total_key, [0, 0, 0, 0])
    total[0] += requests
    total[1] += cost * requests


def add(kind: Kind, account: str, key: str, costs: Mapping[str, int], requests: int) -> None:
    """Count requests of the same costs, in the present bin."""
    start = int(time.time()) // BIN_SECONDS * BIN_SECONDS
    with _lock:
        # Do not begin a bin again that was written and forgotten, even if the clock steps back.
        start = max(start, _forgotten)
        for meter, cost in costs.items():
            _add(TotalKey(kind, ledger_name(account), ledger_name(key), ledger_name(meter), start), cost, requests)


def before_totals(add_more: Callable[[], None]) -> None:
    """Call `add_more` whenever the totals are read: it adds what others have counted, by `add`."""
    _adders.append(add_more)


def start() -> None:
    """Have the totals written from now on."""
    if not _background.running:
        _start()


def _count(kind: Kind, account: str, key: str, costs: Mapping[str, int]) -> None:
    add(kind, account, key, costs, 1)
    _start()
    # Nothing else records it, so write it soon: it must not be lost with the process.
    _background.wake()


def admitted(account: str | None, costs: Mapping[str, int], now: int) -> None:
    """Count a request that the server admitted at `now` (µs by its clock). `account` is such as "account:7"."""
    # Every request comes here, so only append an item, for which threads need no lock.
    _granted.append((account, costs, now))
    if len(_granted) >= _MAX_GRANTED:
        _add_up()
    if not _background.running:
        _start()


def _add_up() -> None:
    """Add the admitted requests to the totals, and what others have counted."""
    for add_more in _adders:
        add_more()
    with _lock:
        for _ in range(len(_granted)):
            account, costs, now = _granted.popleft()
            start = max(now // MICROSECONDS // BIN_SECONDS * BIN_SECONDS, _forgotten)
            owner = account[len("account:") :] if account is not None else ""
            for meter, cost in costs.items():
                _add(TotalKey("admitted", ledger_name(owner), "", ledger_name(meter), start), cost)


def unanswered(account: str, key: str, costs: Mapping[str, int]) -> None:
    """Count a request whose decision was sent but not answered: the server may have counted it or not."""
    _count("unanswered", account, key, costs)


def unmetered(account: str, key: str, costs: Mapping[str, int]) -> None:
    """Count a request that was let through without being counted as usage."""
    _count("unmetered", account, key, costs)


def totals() -> Totals:
    """Return this process' totals: requests and units by TotalKey. They only grow, so it is safe to write twice."""
    _add_up()
    with _lock:
        return {total_key: (requests, units) for total_key, (requests, units, *_written) in _totals.items()}


def _grown() -> Totals:
    _add_up()
    with _lock:
        return {total_key: (total[0], total[1]) for total_key, total in _totals.items() if total[0] != total[2]}


def write_with(write: Callable[[str, Totals], None]) -> None:
    """Use `write` from now on to write totals. It is called with the process' name and the totals."""
    global _write
    _write = write


def write() -> None:
    """Write the totals that have grown since the last time, and forget those that are complete."""
    global _forgotten
    name, grown = process(), _grown()
    if _write is None:
        return
    if grown:
        _write(name, grown)
    end = int(time.time()) // BIN_SECONDS * BIN_SECONDS - _KEPT
    with _lock:
        for total_key, counts in grown.items():
            if total_key in _totals:  # or another thread was faster
                _totals[total_key][2:] = counts
        for total_key in [
            total_key for total_key, total in _totals.items() if total_key.bin < end and total[0] == total[2]
        ]:
            del _totals[total_key]
            _forgotten = max(_forgotten, total_key.bin + BIN_SECONDS)
        if len(_totals) > MAX_WRITTEN:
            _rename()


def _rename() -> None:
    """Go on under another name: written totals stay with the old name, what has grown since begins the new one."""
    global _process
    _process = nonce().decode()
    for total_key, (requests, units, *written) in list(_totals.items()):
        if requests == written[0]:
            del _totals[total_key]
        else:
            _totals[total_key] = [requests - written[0], units - written[1], 0, 0]


def _start() -> None:
    # In tests it would write into a database that is being emptied or, when the process ends, into the project's own.
    if _write is not None and conf.PROCESS_TOTALS_INTERVAL > 0 and not tests.possible:
        _background.start()


_background = Background("ratelimits-process-totals", lambda: conf.PROCESS_TOTALS_INTERVAL, write, turn=1)
