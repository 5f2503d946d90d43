"""Keep the requests of some accounts and keys for some days. Staff can try rules on these requests.

`RECORD_SAMPLE` is the share of the accounts, and of the keys without an account, that are recorded. A hash chooses
them, so all processes choose the same accounts and keys. All requests of a chosen account or key are recorded. So a
trial of a rule on these requests gives the decisions that the rule would have made.

A request is first added to a queue in memory, and a thread writes it to the database. If a process is killed, the
requests of its last `INTERVAL` seconds are lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from django.db import connections, transaction
from django.db.models import Max, Min, Q, Sum

from ratelimits.background import Background
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.usage.models.recorded import RecordedRequest

if TYPE_CHECKING:
    from ratelimits.identity import Identity

#: A request: its moment (µs since 1970 UTC), the identity that made it, its scope, HTTP method, cost in each meter, and
#: whether it was refused.
UnwrittenRequest = tuple[int, "Identity", str, str, Mapping[str, int], bool]
#: Number of rows that are written with one query.
_ROWS_PER_QUERY = 1_000
_SECOND = 1_000_000
#: The largest number that the column `left_out` can store.
_MAX_LEFT_OUT = 2**31 - 1
#: Seconds between two writes.
INTERVAL = 5.0
#: Maximum length of the queue. While the queue is full, further requests are only counted.
MAX_UNWRITTEN = 20_000
#: If the queue has this length, the thread writes at once.
_WAKE_LENGTH = 5_000

_unwritten: deque[UnwrittenRequest] = deque()
#: How many requests were lost or left out since the last successful write.
_left_out = 0
_lock = threading.Lock()


def write_rows(requests: Sequence[UnwrittenRequest], left_out: int = 0) -> None:
    """Write requests. If the table then has more than `RECORD_ROWS` rows, delete the oldest ones.

    `left_out` is the number of earlier requests that could not be recorded. The first row stores this number.
    """
    using = conf.DATABASE
    rows = [
        RecordedRequest(
            at=at,
            user=identity.user or "",
            api_key=identity.api_key or "",
            account=identity.account or "",
            address=identity.address or "",
            scope=ledger_name(scope),
            method=ledger_name(method)[:20],  # The column has 20 characters. No usual method is longer.
            costs={ledger_name(meter): int(cost) for meter, cost in costs.items()},
            refused=refused,
        )
        for at, identity, scope, method, costs, refused in requests
    ]
    if rows:
        rows[0].left_out = min(left_out, _MAX_LEFT_OUT)
    try:
        # If `_trim` fails, the caller counts the requests as lost. So their rows must not stay.
        with transaction.atomic(using=using):
            RecordedRequest.objects.using(using).bulk_create(rows, batch_size=_ROWS_PER_QUERY)
            _trim(using)
    finally:
        # Close this thread's own connection: the thread serves no requests, so Django would never close it. Inside a
        # transaction, as in a test, leave it open.
        if not connections[using].in_atomic_block:
            connections[using].close()


class Trace(NamedTuple):
    """Recorded requests, oldest first.

    more      whether the table has older requests of the same span of time, which were not read
    left_out  how many requests of the same span of time could not be recorded
    """

    rows: list[RecordedRequest]
    more: bool
    left_out: int


def newest(since: int, count: int, scopes: Collection[str] = ("*",)) -> Trace:
    """Return the newest requests since a moment (µs since 1970 UTC), at most `count`.

    Only requests in these scopes are read. "*" stands for all scopes.
    """
    rows = RecordedRequest.objects.using(conf.DATABASE).filter(at__gte=since)
    if "*" not in scopes:
        rows = rows.filter(scope__in=[ledger_name(scope) for scope in scopes])
    newest_first = list(rows.order_by("-at", "-pk")[: count + 1])
    more = len(newest_first) > count
    requests = newest_first[:count][::-1]
    # Read the rows of all scopes: the requests that a row counts as left out can have other scopes than the row. If
    # older requests were not read, begin with the oldest request that was read.
    left_out = RecordedRequest.objects.using(conf.DATABASE).filter(
        at__gte=requests[0].at if more else since, left_out__gt=0
    )
    return Trace(requests, more, left_out.aggregate(sum=Sum("left_out"))["sum"] or 0)


def scopes_since(since: int, count: int) -> list[str]:
    """Return scopes with recorded requests since a moment (µs since 1970 UTC), sorted, at most `count`."""
    rows = RecordedRequest.objects.using(conf.DATABASE).filter(at__gte=since)
    return list(rows.order_by("scope").values_list("scope", flat=True).distinct()[:count])


def refused_requests(identity: Identity, starts: Collection[int], seconds: int, count: int) -> list[RecordedRequest]:
    """Return the newest recorded requests of an identity that were refused, at most `count`.

    The requests are found by the first of these values that the identity has: its API key together with its account,
    its user together with its account, its account, or its address. Only some spans of time are read: they begin at
    `starts` (in seconds since 1970 UTC), and each is `seconds` long. The reason is that the table has an index on the
    time, but not on the keys. The recorder does not store the keys that views give. So an identity that has only such
    keys has no recorded requests.
    """
    if identity.address is None and identity.account is None and identity.narrowest_key is None:
        return []
    spans = Q()
    for start in starts:
        spans |= Q(at__gte=start * _SECOND, at__lt=(start + seconds) * _SECOND)
    rows = RecordedRequest.objects.using(conf.DATABASE).filter(spans, refused=True)
    if identity.api_key or identity.user:
        # In the ledger, a request with an API key counts for this API key, and not for its user. Do the same here.
        rows = rows.filter(api_key=identity.api_key or "", account=identity.account or "")
        rows = rows if identity.api_key else rows.filter(user=identity.user)
    elif identity.account:
        rows = rows.filter(account=identity.account)
    else:
        rows = rows.filter(address=identity.address or "")
    return list(rows.order_by("-at", "-pk")[:count])


def _trim(using: str) -> int:
    """Delete the oldest rows if there are more than `RECORD_ROWS`. Return the number of deleted rows.

    To count the rows would be slow. So take the number of primary keys from the first row to the last row instead.
    """
    rows = RecordedRequest.objects.using(using)
    ends = rows.aggregate(first=Min("pk"), last=Max("pk"))
    if ends["last"] is None or ends["last"] - ends["first"] < conf.RECORD_ROWS:
        return 0
    return int(rows.filter(pk__lte=ends["last"] - conf.RECORD_ROWS)._raw_delete(using))


def expire(now: float) -> int:
    """Delete requests that are older than `RECORD_SECONDS`, and the oldest requests if there are too many.

    Return the number of deleted rows. `now` is in seconds since 1970 UTC.
    """
    using = conf.DATABASE
    old = RecordedRequest.objects.using(using).filter(at__lt=int((now - conf.RECORD_SECONDS) * _SECOND))
    return int(old._raw_delete(using)) + _trim(using)


def in_sample(owner: str, share: float) -> bool:
    """Return whether an account, or a key without an account, is recorded.

    `share` (0 to 1) is the share of the accounts and keys that are recorded.
    """
    return crc32(owner.encode()) < share * 2**32  # a CRC-32 is a number below 2**32


def record(identity: Identity, scope: str, method: str, costs: Mapping[str, int], refused: bool) -> None:
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
        write_rows(requests, left_out)
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
