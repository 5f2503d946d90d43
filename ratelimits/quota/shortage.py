"""While the memory of Redis is short, let new addresses share a count.

A client can invent addresses, and each of them needs memory in Redis. So when memory is short (engine/memory.py), an
address that has no count yet is counted with the other new addresses of its network, or with all new ones. An address
that has a count, or a row in the database, keeps its limits. If memory is full, the same applies to keys that the view
gives to anonymous callers.

To count requests together can refuse a new client because of what other new clients do. Each process knows only its own
level, and counts are not moved when it changes. So a new address can use up to three counts: its own, that of its
network, and that of all. Each of them admits at most what the limit says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from typing import Any

from ratelimits import rules
from ratelimits.addresses import coarser_keys
from ratelimits.engine import NotSent, Unanswered, memory
from ratelimits.engine.command import StatesExist
from ratelimits.engine.memory import Shortage
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.breaker import Breaker
from ratelimits.identity import Identity
from ratelimits.models.fields.view_key_texts import shared_name
from ratelimits.quota.costs import ONE_REQUEST
from ratelimits.quota.prepared import CommandsByKey, PreparedCommand, PreparedCommands, RequestShape
from ratelimits.rules import Snapshot

#: Yields questions: whether states exist in Redis, or which rules an identity has. Returns the command of a request.
Questions = Generator[StatesExist | Identity, Any, PreparedCommand]


def coarser(identity: Identity, snapshot: Snapshot) -> Iterator[Identity]:
    """Yield the identities under which a request of a new address is counted, the finest first. There can be none."""
    shared = identity
    if identity.address is not None and not snapshot.may_have_rows_about(identity.address):
        for address in coarser_keys(identity.address)[: memory.coarser()]:
            shared = identity._replace(address=address)
            yield shared
    names = identity.view_keys
    is_anonymous = identity.user is None and identity.api_key is None
    if names and is_anonymous and memory.level >= Shortage.FULL and not any(map(snapshot.may_have_rows_about, names)):
        yield shared._replace(view_keys=tuple(map(shared_name, names)))


def affordable(
    commands: PreparedCommands,
    by_key: CommandsByKey,
    snapshot: Snapshot,
    shape: RequestShape,
    ready: PreparedCommand,
    breaker: Breaker,
) -> PreparedCommand:
    """Return the command that decides a request without a new state in Redis, if memory is short and this is possible.

    `ready` is the request's own command. Return it if there is enough memory, or if Redis has the states of its keys.
    Otherwise return the command of the finest identity whose states Redis has, or that of the coarsest. Store the
    command in `by_key`. If Redis would have to be asked and `breaker` lets nobody ask, return `ready`, and do not store
    it. Raise NotSent, or redis.exceptions.ResponseError if the server replies with an error.
    """
    if not memory.level or not ready.prepared.invented:
        return by_key.setdefault(_cache_key(shape), ready)
    questions, answer = _questions(commands, snapshot, shape, ready), None
    try:
        while True:
            question = questions.send(answer)
            if isinstance(question, Identity):
                answer = snapshot.select(shape.scope, shape.method, question)
            elif breaker.failures and not breaker.closed:
                return ready
            else:
                answer = _ask(question)
                breaker.succeeded()  # perhaps only one call may try: then the decision may follow the questions
    except StopIteration as end:
        found: PreparedCommand = end.value
        return by_key.setdefault(_cache_key(shape), found)


async def aaffordable(
    commands: PreparedCommands,
    by_key: CommandsByKey,
    snapshot: Snapshot,
    shape: RequestShape,
    ready: PreparedCommand,
    breaker: Breaker,
) -> PreparedCommand:
    """Do the same as `affordable`, in async code. If the caller is cancelled, raise CancelledError."""
    if not memory.level or not ready.prepared.invented:
        return by_key.setdefault(_cache_key(shape), ready)
    questions, answer = _questions(commands, snapshot, shape, ready), None
    try:
        while True:
            question = questions.send(answer)
            if isinstance(question, Identity):
                answer = await rules.aselect(snapshot, shape.scope, shape.method, question)
            elif breaker.failures and not breaker.closed:
                return ready
            else:
                answer = await _aask(question)
                breaker.succeeded()  # perhaps only one call may try: then the decision may follow the questions
    except StopIteration as end:
        found: PreparedCommand = end.value
        return by_key.setdefault(_cache_key(shape), found)


def _cache_key(shape: RequestShape) -> tuple[object, ...]:
    """Return the cache key of the command for a shape, as `quota.checking` makes it."""
    identity, scope, method, costs, at_once = shape
    cache_key = identity, scope, method, at_once
    return cache_key if costs is ONE_REQUEST else (*cache_key, *costs.items())


def _ask(question: StatesExist) -> Any:
    """Return the reply to a question. If it is lost, raise NotSent: Redis has not counted the request yet."""
    try:
        return current_server().wire.call(question, b"")
    except Unanswered as error:
        raise NotSent(str(error), error.event) from error


async def _aask(question: StatesExist) -> Any:
    """Do the same as `_ask`, in async code.

    A caller that was cancelled gets the reply all the same (see `Multiplexed.exchange`). Then raise CancelledError, so
    that its request is not decided. If the question failed, its error is the cause of the CancelledError.
    """
    task = asyncio.current_task()
    assert task is not None
    cancellations_before = task.cancelling()
    try:
        try:
            reply = await current_server().wire.acall(question, b"")
        except Unanswered as error:
            raise NotSent(str(error), error.event) from error
    except Exception as error:
        if task.cancelling() > cancellations_before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > cancellations_before:
        raise asyncio.CancelledError
    return reply


def _questions(
    commands: PreparedCommands, snapshot: Snapshot, shape: RequestShape, ready: PreparedCommand
) -> Questions:
    """Do the same as `affordable`, but let the caller ask Redis and read the rules."""
    for identity in coarser(shape.identity, snapshot):
        if (yield from _is_known(ready)):
            break
        ready = yield from _of(commands, shape._replace(identity=identity))
    return ready


def _is_known(ready: PreparedCommand) -> Generator[StatesExist, bool, bool]:
    """Return whether Redis has a state of each key of this command that a client can invent."""
    command = ready.fetch.command
    for position in ready.prepared.invented if command.call.keys else ():
        if not (yield StatesExist(command.keyspace, command.call, position)):
            return False
    return True


def _of(commands: PreparedCommands, shape: RequestShape) -> Generator[Identity, Any, PreparedCommand]:
    """Return the command of a shape. Make it if there is none yet."""
    by_key, cache_key = commands.by_key, _cache_key(shape)
    ready = by_key.get(cache_key)
    return ready if ready is not None else by_key.setdefault(cache_key, commands.make(shape, (yield shape.identity)))
