"""Carry out the steps of an outbound call, in sync or in async code.

The steps come from a generator (`ratelimits.outbound.deciding`), which yields instructions such as "decide this call".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeVar

from ratelimits import rules
from ratelimits.engine.clock import clock
from ratelimits.engine.decide import adecide_call, decide_call
from ratelimits.engine.server import current_server
from ratelimits.outbound.deciding import DecideCall, SelectRules

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
