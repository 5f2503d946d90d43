"""Count the requests that a block refused or an allow exempted.

Blocks and allows are rows that people edit. A block refuses the requests of a key or network. An allow exempts them
from all rules. Both are applied before any rule, without asking Redis.

Once a second the number of blocked requests is sent to Redis, which counts them as denied. The process totals count the
requests of each block and each allow too.
"""

from __future__ import annotations

import os
import threading
from collections import Counter

from ratelimits.engine.call import ANONYMOUS_KEY, Meter, Usage
from ratelimits.engine.counting import RefusalCount
from ratelimits.identity import Identity
from ratelimits.models.keys import key_name
from ratelimits.rules import AccessRow
from ratelimits.usage.counting import process_totals

#: Maximum length of `_decided`. When this length is reached, its items are added to the counters.
_MAX_DECIDED = 10_000
#: Maximum number of subjects of each counter. Clients can choose costs, so there can be many subjects.
MAX_SUBJECTS = 10_000

Costs = tuple[tuple[str, int], ...]
#: Requests with the same subject have one counter. The items are: the row's target (a key or network); whether the row
#: is a block; the request's account; its API key or user; its cost in each meter.
_Subject = tuple[str, bool, str | None, str | None, Costs]

_lock = threading.Lock()
#: Requests that are not in `_unsent` and `_untotalled` yet, one item for each request.
_decided: list[_Subject] = []
#: For each subject: how many requests were not sent to Redis yet, and how many are not in the process totals yet.
_unsent: Counter[_Subject] = Counter()
_untotalled: Counter[_Subject] = Counter()


def count(row: AccessRow, identity: Identity, costs: Costs) -> None:
    """Count a request that a block refused or an allow exempted."""
    account = identity.account
    # Appending needs no lock.
    _decided.append((row.target, row.blocks, account, identity.api_key or identity.user, costs))
    length = len(_decided)
    if length >= _MAX_DECIDED:
        _add_up()
    if length == 1:  # no other request waits to be added to the counters
        process_totals.start()


def _add_up() -> None:
    """Move the requests from `_decided` to the two counters."""
    no_room: Counter[_Subject] = Counter()
    with _lock:
        length = len(_decided)
        counted = Counter(_decided[:length])
        del _decided[:length]
        _untotalled.update(counted)
        for subject, requests in counted.items():
            has_room = subject in _unsent or len(_unsent) < MAX_SUBJECTS
            (_unsent if has_room else no_room)[subject] += requests
    for (_target, blocked, account, key, costs), requests in no_room.items():
        if blocked:
            owner, counted_key = (account or "").removeprefix("account:"), (key if account else None) or ANONYMOUS_KEY
            process_totals.add("uncounted", owner, counted_key, dict(costs), requests)
    if len(_untotalled) >= MAX_SUBJECTS:
        _total()


def take() -> list[RefusalCount]:
    """Return the counts of the requests that were blocked since the last call. The caller sends these counts to Redis.

    Exempted requests are not counted as denied.
    """
    _add_up()
    with _lock:
        unsent = dict(_unsent)
        _unsent.clear()
    refused: Counter[tuple[str | None, str | None, Costs]] = Counter()
    for (_target, blocked, account, key, costs), requests in unsent.items():
        if blocked:
            # Usage without an account is counted under one key for all callers.
            refused[account, key if account else None, costs] += requests
    return [_refusal_count(account, key, costs, requests) for (account, key, costs), requests in refused.items()]


def _refusal_count(account: str | None, key: str | None, costs: Costs, requests: int) -> RefusalCount:
    no_rule, no_version = 0, 0
    usage = _usage(account, (key if account else None) or ANONYMOUS_KEY, costs)
    return RefusalCount(usage, tuple(cost for _meter, cost in costs), no_rule, no_version, requests)


def _usage(account: str | None, key: str, costs: Costs) -> Usage:
    """Return the usage that Redis counts for blocked requests."""
    owner = (account or "").removeprefix("account:")
    return Usage(owner, key, tuple(Meter(name) for name, _cost in costs))


def _add_totals() -> None:
    _add_up()
    _total()


def _total() -> None:
    """Move the requests from `_untotalled` to the process totals."""
    with _lock:
        untotalled = dict(_untotalled)
        _untotalled.clear()
    for (target, blocked, account, _key, costs), requests in untotalled.items():
        owner = (account or "").removeprefix("account:")
        process_totals.add("blocked" if blocked else "exempt", owner, key_name(target), dict(costs), requests)


def clear() -> None:
    """Forget all counts. A forked process calls this function, because the counts belong to its parent."""
    global _lock
    _lock = threading.Lock()
    _decided.clear()
    _unsent.clear()
    _untotalled.clear()


process_totals.before_totals(_add_totals)
os.register_at_fork(after_in_child=clear)
