"""Decide an HTTP request for an entry point. Let it wait if it was admitted for a later moment, and record it.

At most MAX_WAITING requests of a process wait at the same time. Requests are recorded only if RECORD_SAMPLE is not 0.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping

from asgiref.sync import async_to_sync
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest

from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine.clock import clock
from ratelimits.identity import Identity
from ratelimits.quota import checking, finishing, prepared
from ratelimits.quota.counting import counting


class Waiters:
    """Counts the requests of this process that wait, or that are being decided and perhaps have to wait."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Count from 0 again, with a new lock. A forked process calls this, because both belong to its parent."""
        self._lock = threading.Lock()
        self._count = 0

    def enter(self) -> bool:
        """Count one more request and return True. If MAX_WAITING requests are counted already, return False."""
        with self._lock:
            if self._count >= conf.MAX_WAITING:
                return False
            self._count += 1
            return True

    def leave(self) -> None:
        """Count one request less."""
        with self._lock:
            self._count -= 1


waiters = Waiters()
os.register_at_fork(after_in_child=waiters.clear)


def check_and_wait(
    identity: Identity, scope: str, method: str, costs: Mapping[str, int], request: HttpRequest | None = None
) -> Answer:
    """Decide a request as `quota.checking.check` does. If it is admitted for a later moment, wait until then.

    While MAX_WAITING requests are counted in `waiters`, no further request waits. A request that would have to wait is
    then refused and not charged. If the wait is interrupted, give back the permits of the request. `request` is
    Django's request. If its client closes the connection under ASGI, end the wait and raise asyncio.CancelledError, so
    that the view does not run. Raise WrongCost for costs that are not valid.
    """
    # Count the request only if some rule in the memory of this process lets requests wait.
    may_wait = prepared.may_wait()
    entered = may_wait and waiters.enter()
    try:
        answer = checking.check(identity, scope, method, costs, at_once=may_wait and not entered)
        if conf.RECORD_SAMPLE:
            counting.record(identity, scope, method, costs, not answer.allowed)
        # An admitted request whose client has gone must not reach its view, even if it need not wait.
        if answer.wait or (answer.allowed and finishing.is_abandoned(request)):
            try:
                _wait_unless_cancelled(answer.wait, request)
            except BaseException:
                finishing.give_back(answer)
                raise
        return answer
    finally:
        if entered:
            waiters.leave()


def _wait_unless_cancelled(seconds: float, request: HttpRequest | None) -> None:
    # `clock.frozen` is None, unless a test has stopped the clock. Then `clock.sleep` only moves the clock.
    if clock.frozen is None and isinstance(request, ASGIRequest) and not _runs_a_loop():
        # A sync view runs in a thread. This thread waits for a coroutine, because asgiref cancels the coroutine when
        # the request is cancelled. Nothing could interrupt time.sleep.
        async_to_sync(_await_unless_cancelled)(seconds, request)
    else:
        clock.sleep(seconds)


async def _await_unless_cancelled(seconds: float, request: HttpRequest) -> None:
    # If the request was cancelled before this coroutine began, asgiref does not cancel the coroutine.
    if finishing.is_abandoned(request):
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


def _runs_a_loop() -> bool:
    """Return whether this thread runs an event loop. A sync function cannot use async_to_sync in such a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def acheck_and_wait(identity: Identity, scope: str, method: str, costs: Mapping[str, int]) -> Answer:
    """Decide a request of async code, and wait, as `check_and_wait` does without its argument `request`.

    Other requests of the event loop continue during the wait. If the caller's task is cancelled, the wait ends.
    """
    may_wait = prepared.may_wait()
    entered = may_wait and waiters.enter()
    try:
        answer = await checking.acheck(identity, scope, method, costs, at_once=may_wait and not entered)
        if conf.RECORD_SAMPLE:
            counting.record(identity, scope, method, costs, not answer.allowed)
        if answer.wait:
            try:
                await clock.asleep(answer.wait)
            except BaseException:
                await finishing.agive_back(answer)
                raise
        return answer
    finally:
        if entered:
            waiters.leave()
