"""Decide limits in one call of the deciding script. If an enforced limit refuses, no limit is charged.

Each function that asks the server exists twice: `decide` blocks its thread, `adecide` is for async code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from redis.exceptions import ResponseError

from ratelimits.algorithms.limits import Limit
from ratelimits.conf import conf
from ratelimits.engine import memory
from ratelimits.engine.call import ANY, Call, Op, Receipt, Usage, new_nonce
from ratelimits.engine.clock import clock
from ratelimits.engine.command import Command
from ratelimits.engine.decision import (
    DECIDED,
    LOST,
    OLD_RULES,
    RECEIPT_USED,
    AlreadySettled,
    Decision,
    Full,
    Lost,
    Stale,
    read,
)
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.logs import bounded

logger = bounded(__name__)

#: Maximum cost of one request under one limit or in one meter.
_MAX_COST = 2**40


def parse_reply(call: Call, packed: bytes, nonce: bytes) -> Decision | None:
    """Return the decision in the reply to a call with this nonce.

    A command is valid only for a span of time. If the server's time is outside this span, set `clock` to the server's
    time and return None. The caller then sends the call again. But if the call has a fixed moment (`call.now`), raise
    Stale instead. Also raise Stale if the rules are too old, AlreadySettled if the receipt was used before, and Lost if
    Redis has perhaps lost the state of a limit that is restored from the ledger.
    """
    reply = read(packed)
    if reply[0] == DECIDED:
        return Decision(call, reply, nonce)
    kind, version_or_now = reply
    if kind == RECEIPT_USED:
        raise AlreadySettled("this receipt was refunded or settled before, or is older than RECEIPT_TTL")
    if kind == OLD_RULES:
        raise Stale(version_or_now)
    if kind == LOST:
        raise Lost
    if call.now is not None:
        raise Stale(version=0, now=version_or_now)
    clock.correct(version_or_now)
    return None


def decide_call(server: Server, call: Call, command: Command | None = None) -> Decision:
    """Decide a call. `command` is the prepared command of the call. If it is None, make a command.

    Raise the errors of `parse_reply` and of `Wire.call`. Raise Full if the caller must prepare a new command.
    """
    prepared, command = command, command or Command(server.keyspace, call)
    nonce = new_nonce()
    try:
        decision = parse_reply(call, server.wire.call(command, nonce), nonce)
    except ResponseError as error:
        command, nonce = _despite_full_memory(server, command, prepared, error), new_nonce()
        decision = parse_reply(call, server.wire.call(command, nonce), nonce)
    if decision is None:  # `clock` was wrong, and now it is right: send the call again
        decision = parse_reply(call, server.wire.call(command, nonce), nonce)
    if decision is None:
        raise Stale(version=0, now=clock.now())
    if command.is_first:
        command.is_first = False
    return decision


def _despite_full_memory(server: Server, command: Command, prepared: Command | None, error: ResponseError) -> Command:
    """Return the command that does the same although the server's memory is full.

    Raise Full if the caller has `prepared` the command, and so must make it again. Raise `error` if it has another
    reason, or if the server must not use more memory.
    """
    if not memory.is_refusal(error) or not memory.note_refusal() or command.full:
        raise error
    if prepared is not None:
        raise Full from error
    return Command(server.keyspace, command.call)


async def adecide_call(server: Server, call: Call, command: Command | None = None) -> Decision:
    """Do the same as `decide_call`, in async code. If the caller is cancelled, give back the permits that were taken.

    A cancelled caller first waits for the reply, at most as many seconds as the setting TIMEOUT says. Then
    CancelledError is raised. If the call failed, its error is the cause of the CancelledError.
    """
    prepared, command = command, command or Command(server.keyspace, call)
    nonce = new_nonce()
    task = asyncio.current_task()
    assert task is not None
    cancellations_before = task.cancelling()
    try:
        try:
            decision = parse_reply(call, await server.wire.acall(command, nonce), nonce)
        except ResponseError as error:
            command, nonce = _despite_full_memory(server, command, prepared, error), new_nonce()
            decision = parse_reply(call, await server.wire.acall(command, nonce), nonce)
        if decision is None:
            decision = parse_reply(call, await server.wire.acall(command, nonce), nonce)
        if decision is None:
            raise Stale(version=0, now=clock.now())
        if command.is_first:
            command.is_first = False
    except Exception as error:
        if task.cancelling() > cancellations_before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > cancellations_before:
        await refund_cancelled(server, decision)
    return decision


_refund_tasks: set[asyncio.Future[None]] = set()


async def refund_cancelled(server: Server, decision: Decision) -> NoReturn:
    """Refund a decision whose caller was cancelled, then raise CancelledError."""
    refund_task = asyncio.ensure_future(_give_back(server, decision))
    _refund_tasks.add(refund_task)  # a reference is needed: an event loop has only weak references to its tasks
    refund_task.add_done_callback(_refund_tasks.discard)
    await asyncio.shield(refund_task)
    raise asyncio.CancelledError


async def _give_back(server: Server, decision: Decision) -> None:
    """Refund a decision whose caller was cancelled. If the refund fails, log the error."""
    receipt = decision.receipt
    if receipt is None:
        return
    call = receipt_call(receipt, _no_costs(receipt), conf.RECEIPT_TTL, whole=True)._replace(now=decision.call.now)
    try:
        await adecide_call(server, call)
    except (Unavailable, ResponseError, Stale, AlreadySettled) as error:
        logger.error("The permits of a cancelled request were not given back, receipt %s: %s", receipt.nonce, error)


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
    """Return the call that decides these limits together.

    Raise ValueError if `limits` is empty or a cost is out of range.
    """
    if not limits:
        raise ValueError("name at least one limit")
    keys = tuple(dict.fromkeys(limit.key for limit in limits))
    meter_count = len(usage.meters) if usage is not None else 0
    for limit in limits:
        if not 0 <= limit.cost <= _MAX_COST or limit.cost % 1:
            raise ValueError(f"cost must be a whole number from 0 to 2**40, not {limit.cost!r}")
    terms = tuple(
        Term(
            limit.algorithm,
            limit.name,
            key=keys.index(limit.key),
            slot=meter_count + position,
            mode=limit.mode,
            rule=limit.rule,
            version=limit.version,
            since=limit.since,
        )
        for position, limit in enumerate(limits)
    )
    # Each meter counts the cost of the first limit. So this cost comes first, once for each meter. Then comes the cost
    # of each limit.
    costs = (*(limits[0].cost,) * meter_count, *(limit.cost for limit in limits))
    # If no limit comes from a rule, all have the version 0. Then use None, so that no edit makes the call stale.
    version = max(limit.version for limit in limits) or None
    return Call(
        program(terms),
        keys,
        costs,
        account,
        usage,
        timeout,
        version,
        now=now,
        op=op,
        lease=lease,
        in_account=("user:", "api_key:") if account else (),
    )


def receipt_call(receipt: Receipt, costs: Sequence[int], receipt_ttl: float, *, whole: bool = False) -> Call:
    """Return the call that settles a receipt: it charges the true `costs` minus the costs that were charged before.

    `costs` are in the order of the receipt's costs. `receipt_ttl` is in seconds. Raise ValueError if the number of
    costs is wrong or a cost is out of range.
    """
    if len(costs) != len(receipt.costs) or any(not 0 <= cost <= _MAX_COST or cost % 1 for cost in costs):
        count = len(receipt.costs)
        raise ValueError(f"settle with one whole number from 0 to 2**40 for each of the {count} charged costs")
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
        in_account=receipt.in_account,
    )


def release_call(receipt: Receipt) -> Call:
    """Return the call that ends the leases of a receipt."""
    return Call(
        receipt.program,
        receipt.keys,
        receipt.costs,
        receipt.account,
        op=Op.RELEASE,
        lease=_lease(receipt),
        in_account=receipt.in_account,
    )


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
    """Decide one request. If an enforced limit refuses it, charge no limit. Otherwise charge each limit that admits it.

    timeout  the longest accepted wait in seconds, for algorithms that let requests wait
    account  the account to which the users and API keys in the limits belong
    usage    where the request is counted. If it is None, the request is not counted
    lease    the name of the lease that a `concurrency` limit gives. If it is None, the name is the receipt's nonce
    now      the moment of the decision, in µs since 1970 UTC. If it is None, the server's time is used

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
    """Do the same as `decide`, in async code."""
    call = call_for(limits, account=account, usage=usage, timeout=timeout, now=now, lease=lease)
    return await adecide_call(current_server(), call)


def peek(limits: Sequence[Limit], *, timeout: float = 0, account: str = "", now: int | None = None) -> Decision:
    """Return the decision that `decide` would make, without charging."""
    return decide_call(current_server(), call_for(limits, account=account, timeout=timeout, now=now, op=Op.PEEK))


async def apeek(limits: Sequence[Limit], *, timeout: float = 0, account: str = "", now: int | None = None) -> Decision:
    """Do the same as `peek`, in async code."""
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
    """Take permits now and use them after a wait. The decision's `wait` says how long to wait.

    `max_wait` is the longest accepted wait in seconds. If it is None, any wait is accepted.
    """
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
    """Do the same as `reserve`, in async code."""
    timeout = ANY if max_wait is None else max(max_wait, 0)
    return await adecide(limits, timeout=timeout, account=account, usage=usage, now=now)


def _no_costs(receipt: Receipt) -> tuple[int, ...]:
    return (0,) * len(receipt.costs)


def refund(receipt: Receipt) -> Decision:
    """Give back all permits of a receipt. Raise AlreadySettled if the receipt was refunded or settled before."""
    return decide_call(current_server(), receipt_call(receipt, _no_costs(receipt), conf.RECEIPT_TTL, whole=True))


async def arefund(receipt: Receipt) -> Decision:
    """Do the same as `refund`, in async code."""
    return await adecide_call(current_server(), receipt_call(receipt, _no_costs(receipt), conf.RECEIPT_TTL, whole=True))


def settle(receipt: Receipt, costs: Sequence[int]) -> Decision:
    """Change the charge of a receipt to the true `costs`, even if they are above a limit.

    `costs` are in the order of the receipt's costs. Raise AlreadySettled if the receipt was refunded or settled before.
    """
    return decide_call(current_server(), receipt_call(receipt, costs, conf.RECEIPT_TTL))


async def asettle(receipt: Receipt, costs: Sequence[int]) -> Decision:
    """Do the same as `settle`, in async code."""
    return await adecide_call(current_server(), receipt_call(receipt, costs, conf.RECEIPT_TTL))


def release(receipt: Receipt) -> Decision:
    """End the leases of a receipt. If they have ended before, change nothing."""
    return decide_call(current_server(), release_call(receipt))


async def arelease(receipt: Receipt) -> Decision:
    """Do the same as `release`, in async code."""
    return await adecide_call(current_server(), release_call(receipt))


def reset(limits: Sequence[Limit], *, account: str = "") -> Decision:
    """Delete the states of these limits, so that all their permits are back. The counted usage does not change."""
    return decide_call(current_server(), call_for(limits, account=account, op=Op.RESET))


async def areset(limits: Sequence[Limit], *, account: str = "") -> Decision:
    """Do the same as `reset`, in async code."""
    return await adecide_call(current_server(), call_for(limits, account=account, op=Op.RESET))
