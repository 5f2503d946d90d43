"""Count the requests that spent prefetched permits, and give back permits that were not spent in time.

Redis gets the counts of these requests with the next fetch, and at least every second. A process that is killed does
not send the counts of its last requests. The drain declares these requests as a gap (usage/ledger/process_totals.py).
If usage is not counted, there is nothing to send: the permits are only given back.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from redis.exceptions import ResponseError

from ratelimits.background import Background
from ratelimits.engine.call import new_nonce
from ratelimits.engine.counting import MAX_SPENT_COUNTERS, CountSpent, shard_of_receipt
from ratelimits.engine.decide import decide_call, refund_cancelled
from ratelimits.engine.decision import AlreadySettled, Decision, Stale
from ratelimits.engine.server import Server
from ratelimits.engine.transport.breaker import NodeUnavailable
from ratelimits.engine.transport.connection import NotSent, Unavailable
from ratelimits.logs import bounded
from ratelimits.quota import prefetch as prefetched
from ratelimits.quota.counting import Kind, counting
from ratelimits.quota.prefetch import Prefetch, PrefetchedPermits, UnsentCounts

logger = bounded(__name__)

#: Seconds between two calls of `send_and_give_back` by the thread.
INTERVAL = 1.0


def send(permits: PrefetchedPermits, prefetch: Prefetch | None) -> None:
    """Count the requests that spent earlier prefetches, and record the new `prefetch`, so that it can be spent.

    If this fails, the background thread sends the counts later. The new prefetch is never spent: the thread gives back
    its permits.
    """
    counts = _begin(permits, prefetch)
    while counts is not None:
        try:
            found = permits.server.wire.call(_command([counts]), new_nonce())
        except BaseException as error:
            _fail([counts], error)
            if not isinstance(error, (Unavailable, ResponseError)):
                raise
            return
        _end([counts], found)
        counts = None if counts.are_all else permits.begin_sending()


async def asend(permits: PrefetchedPermits, prefetch: Prefetch | None, decision: Decision) -> None:
    """Do the same as `send`, in async code.

    If the caller is cancelled, refund its request, which `decision` has admitted.
    """
    counts = _begin(permits, prefetch)
    if counts is None:
        return
    task = asyncio.current_task()
    assert task is not None
    cancellations_before = task.cancelling()
    while counts is not None:
        try:
            found = await permits.server.wire.acall(_command([counts]), new_nonce())
        except BaseException as error:
            _fail([counts], error)
            if task.cancelling() == cancellations_before and not isinstance(error, (Unavailable, ResponseError)):
                raise
            break
        _end([counts], found)
        counts = None if counts.are_all else permits.begin_sending()
    if task.cancelling() > cancellations_before:
        await refund_cancelled(permits.server, decision)


def _begin(permits: PrefetchedPermits, prefetch: Prefetch | None) -> UnsentCounts | None:
    if prefetch is not None:
        with _lock:
            _unfinished.append(prefetch)
        _background.start()
    return permits.begin_sending()


def _command(unsent: Sequence[UnsentCounts]) -> CountSpent:
    """Return the command that sends these counts.

    All counts must be of one shard. Only the first of them is allowed to have a new prefetch.
    """
    server, new = unsent[0].permits.server, unsent[0].new
    spent = [spent for counts in unsent for _prefetch, spent in counts.items]
    recorded = (new.receipt.nonce, new.record()) if new is not None else None
    return CountSpent(server.keyspace, shard_of_receipt(server.keyspace, unsent[0].receipt), spent, recorded)


def _fail(unsent: Sequence[UnsentCounts], error: BaseException) -> None:
    logger.warning("Requests that spent prefetched permits are counted later: %s", error)
    for counts in unsent:
        counts.permits.fail_sending(counts, sent=not isinstance(error, NotSent))


def _end(unsent: Sequence[UnsentCounts], found: Sequence[int]) -> None:
    # `found` has one number for each item of all these counts, in their order.
    position = 0
    for counts in unsent:
        counted, lost = counts.permits.end_sending(counts, found[position : position + len(counts.items)])
        position += len(counts.items)
        for prefetch, requests in counted:
            _add_to_totals("admitted", prefetch, requests)
        for prefetch, requests in lost:
            if requests:
                logger.error("Redis has lost a prefetch: perhaps %s requests are not counted.", requests)
            _add_to_totals("unreported", prefetch, requests)


def _add_to_totals(kind: Kind, prefetch: Prefetch, requests: int) -> None:
    """Add requests that spent permits of this prefetch to the process totals."""
    receipt = prefetch.receipt
    if requests == 0 or receipt.usage is None:
        return
    usage = receipt.usage
    # The first costs of the receipt are the costs of one request.
    costs = {meter.name: cost for meter, cost in zip(usage.meters, receipt.costs, strict=False)}
    key = usage.key if kind == "unreported" else ""
    counting.add(kind, usage.account, key, costs, requests, receipt.bin)


def send_and_give_back(*, everything: bool = False) -> None:
    """Count the requests that have spent permits, and give back the permits that were not spent in time.

    If `everything` is true, give back all permits, also those that could still be spent. If Redis does not answer, the
    next call does the rest. If another thread is in this function, first wait until that thread has left it.
    """
    with _sending_lock:
        _send_and_give_back(everything=everything)


def _send_and_give_back(*, everything: bool) -> None:
    global _unfinished
    with _lock:
        unfinished, _unfinished = _unfinished, []
    try:
        answers = _send_all(unfinished, everything=everything)
        for prefetch in unfinished:
            if prefetch.permits.has_ended(prefetch, end_now=everything) and answers:
                answers = _give_back(prefetch)
    finally:
        with _lock:
            _unfinished += [prefetch for prefetch in unfinished if prefetch.recorded or not prefetch.returned]


def _send_all(unfinished: Sequence[Prefetch], *, everything: bool) -> bool:
    """Send the counts of all these prefetches. Return whether Redis answers."""
    sending = list(dict.fromkeys(prefetch.permits for prefetch in unfinished))
    answers = True
    while sending and answers:
        sending, answers = _send_in_bounds(sending, everything=everything)
    return answers


def _send_in_bounds(sending: Iterable[PrefetchedPermits], *, everything: bool) -> tuple[list[PrefetchedPermits], bool]:
    """Send counts. Return the permits that have further counts to send, and whether Redis answers."""
    groups: dict[tuple[Server, int, int], list[UnsentCounts]] = {}
    further: list[PrefetchedPermits] = []
    for permits in sending:
        counts = permits.begin_sending(everything=everything)
        if counts is not None:
            shard = shard_of_receipt(permits.server.keyspace, counts.receipt)
            # Counts with a new prefetch are sent in a command of their own.
            groups.setdefault((permits.server, shard, id(counts) if counts.new else 0), []).append(counts)
    answers = True
    for (server, _shard, _id), group in groups.items():
        for unsent in _in_bounds(group):
            try:
                if not answers:  # do not ask it again
                    raise NotSent("the server has not answered just now")
                found = server.wire.call(_command(unsent), new_nonce())
            except Exception as error:  # noqa: BLE001  (the counts are sent again, whatever the error is)
                _fail(unsent, error)
                # If only one node of a cluster failed, the other nodes can still answer.
                answers = answers and isinstance(error, (ResponseError, NodeUnavailable))
            else:
                _end(unsent, found)
                further += [counts.permits for counts in unsent if not counts.are_all]
    return further, answers


def _in_bounds(group: Sequence[UnsentCounts]) -> Iterator[list[UnsentCounts]]:
    """Yield the counts in lists for one command each, so that no list has more than MAX_SPENT_COUNTERS counters."""
    unsent: list[UnsentCounts] = []
    for counts in group:
        if unsent and sum(one.counters for one in unsent) + counts.counters > MAX_SPENT_COUNTERS:
            yield unsent
            unsent = []
        unsent.append(counts)
    if unsent:
        yield unsent


def _give_back(prefetch: Prefetch) -> bool:
    """Give the unspent permits of a prefetch back to Redis. Return whether Redis answers.

    If Redis answers with an error, or if the reply is lost, nobody can use these permits until the window ends. A
    command that has perhaps arrived is never sent again.
    """
    if prefetch.returned or not prefetch.left:
        prefetch.returned = True
        return True
    try:
        decide_call(prefetch.permits.server, prefetch.give_back_call())
    except (Unavailable, ResponseError, Stale, AlreadySettled) as error:
        logger.info("Unspent permits of %s requests were not given back: %s", prefetch.left, error)
        if isinstance(error, NotSent):
            return isinstance(error, NodeUnavailable)  # only one node failed: the other nodes can still answer
        prefetch.returned = True
        return isinstance(error, NodeUnavailable) or not isinstance(error, Unavailable)
    prefetch.returned = True
    return True


def clear() -> None:
    """Forget all permits of this process, and counts that were not sent. A test calls this."""
    _forget()
    prefetched.clear()


def _forget() -> None:
    global _lock, _sending_lock, _unfinished
    _lock, _sending_lock, _unfinished = threading.Lock(), threading.Lock(), []


#: Protects `_unfinished`.
_lock = threading.Lock()
#: Held by the thread that sends counts and gives permits back.
_sending_lock = threading.Lock()
#: Prefetches with requests that are perhaps not counted, or with permits that must perhaps be given back.
_unfinished: list[Prefetch] = []
_background = Background(
    "ratelimits-prefetch",
    lambda: INTERVAL,
    send_and_give_back,
    lambda: send_and_give_back(everything=True),
    end_order=3,
)
os.register_at_fork(after_in_child=_forget)
