"""Wait for the permits of an outbound call, without polling, in sync or in async code.

Some algorithms grant permits for a later moment: then the caller sleeps until this moment. Other algorithms refuse:
then the caller sleeps until the moment that the refusal names, and asks again. If a `concurrency` limit refuses, the
caller waits until the server reports a released lease.

The code is written once, for sync and async callers: generators yield instructions, such as "decide this call". `run`
and `arun` carry out each instruction and send back its result.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from ratelimits import rules
from ratelimits.algorithms.limits import Algorithm
from ratelimits.answers.answer import Answer
from ratelimits.engine import Decision, Receipt, Unavailable, asettle, settle
from ratelimits.engine.call import Call, Op, shard
from ratelimits.engine.clock import clock
from ratelimits.engine.decide import adecide_call, decide_call
from ratelimits.engine.keys import own_name
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity, with_account
from ratelimits.models.keys import key_name
from ratelimits.outbound.deciding import (
    PAUSE,
    PROJECT,
    DecideCall,
    Outbound,
    SelectRules,
    Turn,
    WaitTooLong,
    algorithm_from_rate,
)
from ratelimits.quota import finishing
from ratelimits.quota.costs import ONE_REQUEST, valid_costs

T = TypeVar("T")


class Sleep(NamedTuple):
    """An instruction: do nothing for this number of seconds."""

    seconds: float


class AwaitRelease(NamedTuple):
    """An instruction: wait until a lease is released, for at most this number of seconds.

    The result is the element that a script adds to the list at `key`, a Redis key of this shard; None if no element was
    added in this time.
    """

    shard: int
    key: str
    seconds: float


def _do(instruction: Any) -> Any:
    match instruction:
        case SelectRules(scope, identity, newer_version, again):
            snapshot = rules.reload(newer_version) if again or newer_version is not None else rules.current()
            return snapshot.select_exact(scope, identity)
        case DecideCall(call):
            return decide_call(current_server(), call)
        case AwaitRelease(shard, key, seconds):
            server = current_server()
            return server.wire.wire_of(server.keyspace, shard).pop(key, seconds)
        case _:  # Sleep
            clock.sleep(instruction.seconds)
            return None


async def _ado(instruction: Any) -> Any:
    match instruction:
        case SelectRules(scope, identity, newer_version, again):
            read_again = again or newer_version is not None
            snapshot = await (rules.areload(newer_version) if read_again else rules.acurrent())
            return await rules.aselect_exact(snapshot, scope, identity)
        case DecideCall(call):
            return await adecide_call(current_server(), call)
        case AwaitRelease(shard, key, seconds):
            server = current_server()
            return await server.wire.wire_of(server.keyspace, shard).apop(key, seconds)
        case _:  # Sleep
            await clock.asleep(instruction.seconds)
            return None


def run(steps: Generator[Any, Any, T]) -> T:
    """Carry out the steps in this thread, and return their result."""

    async def do(instruction: Any) -> Any:
        return _do(instruction)

    try:
        # The coroutine never waits for an event loop, so it runs to its end at once, and StopIteration has its result.
        arun(steps, do).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a sync instruction has suspended the coroutine")


async def arun(steps: Generator[Any, Any, T], do: Callable[[Any], Awaitable[Any]] = _ado) -> T:
    """Carry out the steps in async code, and return their result. Other tasks of the event loop continue.

    `do` carries out one instruction.
    """
    try:
        instruction = next(steps)
        while True:
            try:
                result = await do(instruction)
            except BaseException as error:  # noqa: BLE001  (the generator raises it again)
                instruction = steps.throw(error)
            else:
                instruction = steps.send(result)
    except StopIteration as end:
        result_of_steps: T = end.value
        return result_of_steps


class Permit:
    """The granted permits of an outbound call.

    waited   seconds that the call has waited
    receipt  the receipt, with which the permits can be settled; None if no limit was charged
    """

    __slots__ = ("_meters", "receipt", "waited")

    def __init__(self, receipt: Receipt | None, waited: float, meters: tuple[str, ...]) -> None:
        self.receipt = receipt
        self.waited = waited
        self._meters = meters

    def settle(self, cost: int | Mapping[str, int]) -> Decision | None:
        """Change the charge to the true cost, up or down, even above a limit. Call this at most once.

        Return the new decision; None if no limit was charged. Raise AlreadySettled at a second call, and
        engine.Unavailable if Redis cannot be asked.
        """
        return settle(self.receipt, self._true_costs(cost)) if self.receipt is not None else None

    async def asettle(self, cost: int | Mapping[str, int]) -> Decision | None:
        """Do the same as `settle`, in async code."""
        return await asettle(self.receipt, self._true_costs(cost)) if self.receipt is not None else None

    def _true_costs(self, cost: int | Mapping[str, int]) -> tuple[int, ...]:
        assert self.receipt is not None
        costs = valid_costs(costs_by_meter(cost))
        unknown = sorted(set(costs) - set(self._meters))
        if unknown:
            raise ValueError(f"this call was not charged in {', '.join(unknown)}, only in {', '.join(self._meters)}")
        return tuple(costs.get(meter, charged) for meter, charged in zip(self._meters, self.receipt.costs, strict=True))


def costs_by_meter(cost: int | Mapping[str, int]) -> Mapping[str, int]:
    """Return costs by meter. A number is a cost in the meter "requests"."""
    return cost if isinstance(cost, Mapping) else {"requests": cost}


class permits:  # noqa: N801  (used like a function, as `contextlib.suppress` is)
    """Wait for permits, then run the block: `with permits("mailer-api", cost=1, max_wait=30) as permit: …`.

    Also use it as `async with`. Leases of `concurrency` limits end with the block.

    name      the scope of the rules that limit this call. Rules for "*" do not limit it. If no rule has this scope,
              the call is not limited
    cost      a number of permits of the meter "requests", or a mapping of meters to costs, such as {"tokens": 250}
    rate      a limit given in code, which is used instead of rules: a text such as "3000/min", or an Algorithm
    max_wait  the longest wait in seconds; None for any wait
    identity  the identity whose keys the rules count, such as Identity(user="user:42"). Without it, rules for each user
              or account do not apply, and the remaining rules count all calls together

    The `with` statement raises WaitTooLong if the permits are not granted within `max_wait`, and WrongCost for a cost
    that is not valid. In both cases nothing is charged. If the wait is interrupted, the permits are given back.
    """

    def __init__(
        self,
        name: str,
        cost: int | Mapping[str, int] = ONE_REQUEST,
        *,
        rate: str | Algorithm | None = None,
        max_wait: float | None = None,
        identity: Identity = PROJECT,
    ) -> None:
        costs = valid_costs(costs_by_meter(cost))
        if rate is not None and len(costs) > 1:
            raise ValueError("a rate given in code has one meter: give the cost as a number")
        algorithm = algorithm_from_rate(rate) if isinstance(rate, str) else rate
        # Code writes view keys as people do: "header:X-Tenant=acme".
        identity = identity._replace(view_keys=tuple(map(key_name, identity.view_keys)))
        self._outbound = Outbound(name, costs, algorithm, with_account(identity))
        self._max_wait = max_wait
        self._leased: Receipt | None = None

    def __enter__(self) -> Permit:
        started = time.monotonic()
        turn = run(_until_granted(self._outbound, self._max_wait))
        if turn.wait:
            try:
                clock.sleep(turn.wait)
            except BaseException:
                finishing.give_back(Answer(True, turn.decision))
                raise
        return self._permit(turn, started)

    async def __aenter__(self) -> Permit:
        started = time.monotonic()
        turn = await arun(_until_granted(self._outbound, self._max_wait))
        if turn.wait:
            try:
                await clock.asleep(turn.wait)
            except BaseException:
                await finishing.agive_back(Answer(True, turn.decision))
                raise
        return self._permit(turn, started)

    def _permit(self, turn: Turn, started: float) -> Permit:
        receipt = turn.decision.receipt if turn.decision is not None else None
        if receipt is not None and any(term.algorithm.leases for term in receipt.program.terms):
            self._leased = receipt
        return Permit(receipt, time.monotonic() - started, tuple(self._outbound.costs))

    def __exit__(self, *exc_info: object) -> None:
        if self._leased is not None:
            finishing.end_leases(self._leased)

    async def __aexit__(self, *exc_info: object) -> None:
        if self._leased is not None:
            await finishing.aend_leases(self._leased)


def _until_granted(outbound: Outbound, max_wait: float | None) -> Generator[Any, Any, Turn]:
    """Ask, and wait after each refusal, until the permits are granted. Return the last answer.

    Raise WaitTooLong if this would take longer than `max_wait` seconds.
    """
    started = time.monotonic()
    while True:
        seconds_left = None if max_wait is None else max_wait - (time.monotonic() - started)
        turn = yield from outbound.ask(seconds_left)
        if turn.allowed:
            return turn
        needed = seconds_needed(turn, seconds_left)
        waits_for_lease = turn.algorithm is not None and turn.algorithm.leases
        if seconds_left is None:
            too_long = False
        elif waits_for_lease:
            # A lease can be released before it expires, so wait for a release until the end of `max_wait`.
            too_long = seconds_left <= 0
        else:
            too_long = needed is not None and needed > seconds_left
        if needed is None or too_long:
            raise WaitTooLong(outbound.name, turn.limit, needed, max_wait)
        if waits_for_lease:
            lease = yield from _released(turn, needed if seconds_left is None else min(needed, seconds_left))
            if lease is not None:
                return outbound.handed_over(turn, lease)
        else:
            yield Sleep(turn.retry_after or 0.0)


def seconds_needed(turn: Turn, timeout: float | None) -> float | None:
    """Return the seconds after which refused permits could be granted, if no other call comes; None if never.

    A limit that lets calls wait refuses a call that would have to wait longer than `timeout` seconds. After
    `retry_after` seconds, this wait would only be `timeout` seconds. So the permits could be granted after the sum of
    both. If the limit refuses because its queue is full, return `retry_after`, after which the queue has room.
    """
    algorithm = turn.algorithm
    if turn.retry_after is None or timeout is None or algorithm is None or not algorithm.may_wait:
        return turn.retry_after
    assert turn.decision is not None
    standing = turn.decision.standings[turn.decision.binding or 0]
    queue_is_full = algorithm.may_be_full and standing.remaining < max(turn.decision.call.costs)
    if queue_is_full:
        return turn.retry_after
    return turn.retry_after + max(timeout, 0)


def _released(turn: Turn, seconds: float) -> Generator[Any, Any, bytes | None]:
    """Wait until a lease is released, for at most this number of seconds.

    Return the name of the lease that the server has given to this call; None if the call must ask again.
    """
    assert turn.decision is not None
    assert turn.decision.binding is not None
    call = turn.decision.call
    term = turn.decision.program.terms[turn.decision.binding]
    key = call.keys[term.key]
    keyspace = current_server().keyspace
    shard_id = shard(keyspace, key, call.account, call.in_account)
    storage = term.algorithm.storage
    # The list to which the script adds the leases that it makes for waiting callers.
    freed = keyspace.own(shard_id, own_name(storage.own, term.name), key) + storage.optional["freed"]
    try:
        lease: bytes | None = yield AwaitRelease(shard_id, freed, seconds)
        # The name of a lease contains "~". A text without "~" is not a lease: it only tells the call to ask again.
        if lease is None or b"~" not in lease:
            return None
        if len(call.program.terms) == 1 and call.costs == (1,):
            return lease
        # The lease is one permit of one limit. This call has more limits, or needs more permits. So end the lease: then
        # the script gives the permit to another call.
        yield DecideCall(
            Call(
                call.program,
                call.keys,
                call.costs,
                call.account,
                op=Op.RELEASE,
                lease=lease.decode(),
                in_account=call.in_account,
            )
        )
    except Unavailable:
        # After this pause, the caller asks again, and so finds out whether Redis answers.
        yield Sleep(min(seconds, PAUSE))
    return None
