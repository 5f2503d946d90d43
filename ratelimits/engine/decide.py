"""Limits to decision: one script call, all or nothing.

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
    """What the answer to a call decides; None: this machine's clock was wrong and is put right, call again.

    Raises Stale, AlreadySettled.
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
    clock.put_right(reply[1])
    return None


def decide_call(server: Server, call: Call, command: Command | None = None) -> Decision:
    """Decide, by the command prepared for the call if there is one. Raises as `parse_reply` and `Wire.call` do."""
    command = command or Command(server.keyspace, call)
    name = nonce()
    decision = parse_reply(call, server.wire.call(command, name), name)
    if decision is None:
        decision = parse_reply(call, server.wire.call(command, name), name)
    if decision is None:
        raise Stale(0, clock.now())
    return decision


async def adecide_call(server: Server, call: Call, command: Command | None = None) -> Decision:
    """`decide_call`, awaited. What a caller was granted is given back if it is cancelled meanwhile.

    Such a caller has the reply first, within TIMEOUT, then CancelledError. Its cause is the error, if there was one.
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
        _giving.add(giving)  # a loop keeps no task alive
        giving.add_done_callback(_giving.discard)
        await asyncio.shield(giving)
        raise asyncio.CancelledError
    return decision


_giving: set[asyncio.Future[None]] = set()


async def _give_back(server: Server, decision: Decision) -> None:
    """Refund what nobody will hear of."""
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
    """The call that decides these limits together. Raises ValueError for costs that make no sense."""
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
    # Each limit brings its own cost; the meters' come first, each that of the first limit unless told otherwise.
    costs = (*(limits[0].cost,) * first, *(limit.cost for limit in limits))
    # Limits of no rule, at no version, are not what an edit is about.
    version = max(limit.version for limit in limits) or None
    return Call(program(terms), keys, costs, account, usage, timeout, version, now=now, op=op, lease=lease)


def receipt_call(receipt: Receipt, costs: Sequence[int], receipt_ttl: float, *, whole: bool = False) -> Call:
    """The call that books the difference to what a receipt took; `costs` are the true ones, by slot."""
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
    """The call that ends the leases of a receipt."""
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
    """Admit and charge a request under all limits, or under none of them.

    `timeout` is the longest wait in seconds that is accepted where the algorithm lets wait. `account` owns the keys
    that are a user's, an API key's or its own; `usage` says where the request is counted. `lease` names what
    `concurrency` hands out (default: the receipt's nonce). `now` (µs since 1970 UTC) stands in for the server's clock.
    Raises engine.Unavailable when the server cannot be asked.
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
    """`decide`, awaited."""
    call = call_for(limits, account=account, usage=usage, timeout=timeout, now=now, lease=lease)
    return await adecide_call(current_server(), call)


def peek(limits: Sequence[Limit], *, timeout: float = 0, account: str = "", now: int | None = None) -> Decision:
    """What `decide` would answer, changing nothing."""
    return decide_call(current_server(), call_for(limits, account=account, timeout=timeout, now=now, op=Op.PEEK))


async def apeek(limits: Sequence[Limit], *, timeout: float = 0, account: str = "", now: int | None = None) -> Decision:
    """`peek`, awaited."""
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
    """Take permits ahead of time: granted with a `wait` of at most `max_wait` seconds (None: any)."""
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
    """`reserve`, awaited."""
    timeout = ANY if max_wait is None else max(max_wait, 0)
    return await adecide(limits, timeout=timeout, account=account, usage=usage, now=now)


def _nothing(receipt: Receipt) -> tuple[int, ...]:
    return (0,) * len(receipt.costs)


def refund(receipt: Receipt) -> Decision:
    """Give back all that a receipt took, once; raises AlreadySettled the second time."""
    return decide_call(current_server(), receipt_call(receipt, _nothing(receipt), conf.RECEIPT_TTL, whole=True))


async def arefund(receipt: Receipt) -> Decision:
    """`refund`, awaited."""
    return await adecide_call(current_server(), receipt_call(receipt, _nothing(receipt), conf.RECEIPT_TTL, whole=True))


def settle(receipt: Receipt, costs: Sequence[int]) -> Decision:
    """Charge what was truly used, once, even over the limit: `costs` in the order they were charged in."""
    return decide_call(current_server(), receipt_call(receipt, costs, conf.RECEIPT_TTL))


async def asettle(receipt: Receipt, costs: Sequence[int]) -> Decision:
    """`settle`, awaited."""
    return await adecide_call(current_server(), receipt_call(receipt, costs, conf.RECEIPT_TTL))


def release(receipt: Receipt) -> Decision:
    """End the leases of a receipt; one that has ended or was released before is left alone."""
    return decide_call(current_server(), release_call(receipt))


async def arelease(receipt: Receipt) -> Decision:
    """`release`, awaited."""
    return await adecide_call(current_server(), release_call(receipt))


def reset(limits: Sequence[Limit], *, account: str = "") -> Decision:
    """Forget the states of these limits: as never seen. What was counted as usage stays counted."""
    return decide_call(current_server(), call_for(limits, account=account, op=Op.RESET))


async def areset(limits: Sequence[Limit], *, account: str = "") -> Decision:
    """`reset`, awaited."""
    return await adecide_call(current_server(), call_for(limits, account=account, op=Op.RESET))
