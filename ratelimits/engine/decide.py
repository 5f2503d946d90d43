"""Decide limits in one call of the script: all of them admit and are charged, or none is.

What does no I/O is written once: the functions that make a call, and `parse_reply`. Each function that asks the server
exists twice: by its plain name it blocks, and its version with a leading "a" is awaited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from redis.exceptions import ResponseError

from ratelimits.algorithms.limits import Limit
from ratelimits.conf import conf
from ratelimits.engine.call import ANY, Call, Command, Op, Receipt, Usage, clock, nonce
from ratelimits.engine.decision import AlreadySettled, Decision, Stale, read
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.connection import Unavailable

logger = logging.getLogger(__name__)


def parse_reply(call: Call, packed: bytes, name: bytes) -> Decision | None:
    """Return the decision in the reply to a call. `name` is the call's nonce.

    Return None if this machine's clock was wrong: it was corrected, so call again. Raise Stale or AlreadySettled.
    """
    reply = read(packed)
    if reply[0] == 1:
        return Decision(call, reply, name)
    if reply[0] == 2:
        raise AlreadySettled("this receipt was refunded or settled before, or is older than RECEIPT_TTL")
    if reply[0] == 0:
        raise Stale(reply[1])
    if call.now is not None:
        raise Stale(0, reply[1])
    clock.correct(reply[1])
    return None


def decide_call(server: Server, call: Call, command: Command | None = None) -> Decision:
    """Decide a call, with its prepared command if there is one. Raise what `parse_reply` and `Wire.call` raise."""
    command = command or Command(server.keyspace, call)
    name = nonce()
    decision = parse_reply(call, server.wire.call(command, name), name)
    if decision is None:
        decision = parse_reply(call, server.wire.call(command, name), name)
    if decision is None:
        raise Stale(0, clock.now())
    return decision


async def adecide_call(server: Server, call: Call, command: Command | None = None) -> Decision:
    """Do as `decide_call`, awaited. Give back what was granted if the caller is cancelled meanwhile.

    Such a caller first waits for the reply, at most TIMEOUT, then gets CancelledError. If the call failed, that error
    is its cause.
    """
    command = command or Command(server.keyspace, call)
    name = nonce()
    task = asyncio.current_task()
    assert task is not None
    cancelled = task.cancelling()
    try:
        decision = parse_reply(call, await server.wire.acall(command, name), name)
        if decision is None:
            decision = parse_reply(call, await server.wire.acall(command, name), name)
        if decision is None:
            raise Stale(0, clock.now())
    except Exception as error:
        if task.cancelling() > cancelled:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > cancelled:
        giving = asyncio.ensure_future(_give_back(server, decision))
        _giving.add(giving)  # an event loop does not keep its tasks alive
        giving.add_done_callback(_giving.discard)
        await asyncio.shield(giving)
        raise asyncio.CancelledError
    return decision


_giving: set[asyncio.Future[None]] = set()


async def _give_back(server: Server, decision: Decision) -> None:
    """Refund a decision whose caller was cancelled. Log an error that prevents it."""
    receipt = decision.receipt
    if receipt is None:
        return
    call = receipt_call(receipt, _nothing(receipt), conf.RECEIPT_TTL, whole=True)._replace(now=decision.call.now)
    try:
        await adecide_call(server, call)
    except (Unavailable, ResponseError, Stale, AlreadySettled) as error:
        logger.error("What a cancelled request took could not be given back, receipt %s: %s", receipt.nonce, error)


def call_for(
    limits: Sequence[Limit],
    *,
    account: str = "",
    usage: Usage | None = None,
    timeout: float = 0,
    now: int | None = None,
    op: Op = Op.TRY,
    lease: str | None = None,
) -> Call:
    """Return the call that decides these limits together. Raise ValueError for no limits, or a cost out of range."""
    if not limits:
        raise ValueError("name at least one limit")
    keys = tuple(dict.fromkeys(limit.key for limit in limits))
    first = len(usage.meters) if usage is not None else 0
    for limit in limits:
        if not 0 <= limit.cost <= 2**40 or limit.cost % 1:
            raise ValueError(f"cost must be a whole number from 0 to 2**40, not {limit.cost!r}")
    terms = tuple(
        Term(
            limit.algorithm,
            limit.name,
            keys.index(limit.key),
            first + number,
            limit.mode,
            limit.rule,
            limit.version,
            limit.since,
        )
        for number, limit in enumerate(limits)
    )
    # First one cost for each meter, that of the first limit; then the cost of each limit.
    costs = (*(limits[0].cost,) * first, *(limit.cost for limit in limits))
    # Limits without a rule have no version, so no edit makes them stale.
    version = max(limit.version for limit in limits) or None
    return Call(program(terms), keys, costs, account, usage, timeout, version, now=now, op=op, lease=lease)


def receipt_call(receipt: Receipt, costs: Sequence[int], receipt_ttl: float, *, whole: bool = False) -> Call:
    """Return the call that charges the difference between a receipt's costs and the true `costs`, by slot.

    Raise ValueError for the wrong number of costs, or a cost out of range. `receipt_ttl` is in seconds.
    """
    if len(costs) != len(receipt.costs) or any(not 0 <= cost <= 2**40 or cost % 1 for cost in costs):
        raise ValueError(f"settle with {len(receipt.costs)} whole costs from 0 to 2**40, one for each that was charged")
    differences = tuple(true - charged for true, charged in zip(costs, receipt.costs, strict=True))
    return Call(
        receipt.program,
        receipt.keys,
        differences,
        receipt.account,
        receipt.usage,
        op=Op.SETTLE,
        lease=_lease(receipt),
        receipt=receipt,
        whole=whole,
        receipt_ttl=receipt_ttl,
    )


def release_call(receipt: Receipt) -> Call:
    """Return the call that ends the leases of a receipt."""
    return Call(receipt.program, receipt.keys, receipt.costs, receipt.account, op=Op.RELEASE, lease=_lease(receipt))


def _lease(receipt: Receipt) -> str:
    return receipt.nonce if receipt.lease is None else receipt.lease


def decide(
    limits: Sequence[Limit],
    *,
    timeout: float = 0,
    account: str = "",
    usage: Usage | None = None,
    now: int | None = None,
    lease: str | None = None,
) -> Decision:
    """Admit a request and charge it under all limits, or charge it under none.

    timeout  the longest wait in seconds that is accepted, for algorithms that let requests wait
    account  the owner of the keys of users, API keys and itself
    usage    where the request is counted; None: it is not counted
    lease    the name of the lease that `concurrency` gives; None: the receipt's nonce
    now      in µs since 1970 UTC, instead of the server's clock

    Raise ValueError for a cost out of range, and engine.Unavailable if the server cannot be asked.
    """
    call = call_for(limits, account=account, usage=usage, timeout=timeout, now=now, lease=lease)
    return decide_call(current_server(), call)


async def adecide(
    limits: Sequence[Limit],
    *,
    timeout: float = 0,
    account: str = "",
    usage: Usage | None = None,
    now: int | None = None,
    lease: str | None = None,
) -> Decision:
    """Do as `decide`, awaited."""
    call = call_for(limits, account=account, usage=usage, timeout=timeout, now=now, lease=lease)
    return await adecide_call(current_server(), call)


def peek(limits: Sequence[Limit], *, timeout: float = 0, account: str = "", now: int | None = None) -> Decision:
    """Return the decision that `decide` would make, without charging."""
    return decide_call(current_server(), call_for(limits, account=account, timeout=timeout, now=now, op=Op.PEEK))


async def apeek(limits: Sequence[Limit], *, timeout: float = 0, account: str = "", now: int | None = None) -> Decision:
    """Do as `peek`, awaited."""
    call = call_for(limits, account=account, timeout=timeout, now=now, op=Op.PEEK)
    return await adecide_call(current_server(), call)


def reserve(
    limits: Sequence[Limit],
    *,
    max_wait: float | None = None,
    account: str = "",
    usage: Usage | None = None,
    now: int | None = None,
) -> Decision:
    """Take permits in advance. The decision's `wait` is at most `max_wait` seconds (None: any)."""
    timeout = ANY if max_wait is None else max(max_wait, 0)
    return decide(limits, timeout=timeout, account=account, usage=usage, now=now)


async def areserve(
    limits: Sequence[Limit],
    *,
    max_wait: float | None = None,
    account: str = "",
    usage: Usage | None = None,
    now: int | None = None,
) -> Decision:
    """Do as `reserve`, awaited."""
    timeout = ANY if max_wait is None else max(max_wait, 0)
    return await adecide(limits, timeout=timeout, account=account, usage=usage, now=now)


def _nothing(receipt: Receipt) -> tuple[int, ...]:
    return (0,) * len(receipt.costs)


def refund(receipt: Receipt) -> Decision:
    """Give back everything that a receipt took. Raise AlreadySettled the second time."""
    return decide_call(current_server(), receipt_call(receipt, _nothing(receipt), conf.RECEIPT_TTL, whole=True))


async def arefund(receipt: Receipt) -> Decision:
    """Do as `refund`, awaited."""
    return await adecide_call(current_server(), receipt_call(receipt, _nothing(receipt), conf.RECEIPT_TTL, whole=True))


def settle(receipt: Receipt, costs: Sequence[int]) -> Decision:
    """Charge what was really used, even if it exceeds the limit. `costs` are in the order of the receipt's costs.

    Raise AlreadySettled the second time.
    """
    return decide_call(current_server(), receipt_call(receipt, costs, conf.RECEIPT_TTL))


async def asettle(receipt: Receipt, costs: Sequence[int]) -> Decision:
    """Do as `settle`, awaited."""
    return await adecide_call(current_server(), receipt_call(receipt, costs, conf.RECEIPT_TTL))


def release(receipt: Receipt) -> Decision:
    """End the leases of a receipt. Leases that have ended already stay ended."""
    return decide_call(current_server(), release_call(receipt))


async def arelease(receipt: Receipt) -> Decision:
    """Do as `release`, awaited."""
    return await adecide_call(current_server(), release_call(receipt))


def reset(limits: Sequence[Limit], *, account: str = "") -> Decision:
    """Delete the states of these limits, as if never used. Usage stays counted."""
    return decide_call(current_server(), call_for(limits, account=account, op=Op.RESET))


async def areset(limits: Sequence[Limit], *, account: str = "") -> Decision:
    """Do as `reset`, awaited."""
    return await adecide_call(current_server(), call_for(limits, account=account, op=Op.RESET))
