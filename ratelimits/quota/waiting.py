"""Let HTTP requests wait: the wait itself, and a limit of the requests that wait in this process at once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping

from asgiref.sync import async_to_sync
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest

from ratelimits.conf import conf
from ratelimits.identity import Identity
from ratelimits.quota import checking, finishing, prepared
from ratelimits.quota.checking import Answer


class Waiters:
    """Counts the requests of this process that may have to wait."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Count none: in a forked process they belong to the parent, which a thread may have left with the lock."""
        self._lock = threading.Lock()
        self._count = 0

    def enter(self) -> bool:
        """Count one more request and return True; return False if MAX_WAITING are counted."""
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
    """Decide a request as `quota.checking.check` does, and wait if the rules admit it for later.

    If MAX_WAITING requests of this process wait, refuse one more that would have to, without a charge. If the wait is
    interrupted, give back what the request took. `request` is Django's: if its client goes meanwhile, end the wait and
    raise asyncio.CancelledError, so that the view does not run. Raise WrongCost as `check` does.
    """
    # If no rule lets requests wait, do not count this one. An edit at this moment may still make it wait.
    crowded = prepared.may_wait()
    entered = crowded and waiters.enter()
    try:
        answer = checking.check(identity, scope, method, costs, at_once=crowded and not entered)
        if answer.wait or (answer.allowed and finishing.is_abandoned(request)):
            try:
                _hold_back(answer.wait, request)
            except BaseException:
                finishing.give_back(answer)
                raise
        return answer
    finally:
        if entered:
            waiters.leave()


def _hold_back(seconds: float, request: HttpRequest | None) -> None:
    if isinstance(request, ASGIRequest) and not _runs_a_loop():
        # If the request of a sync view is cancelled, asgiref cancels what its thread awaits. time.sleep would go on.
        async_to_sync(_ahold_back)(seconds, request)
    else:
        time.sleep(seconds)


async def _ahold_back(seconds: float, request: HttpRequest) -> None:
    # If the request was cancelled before this task began, nobody cancels the task.
    if finishing.is_abandoned(request):
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


def _runs_a_loop() -> bool:
    """Return whether this thread runs an event loop: then a sync function cannot await anything in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def acheck_and_wait(identity: Identity, scope: str, method: str, costs: Mapping[str, int]) -> Answer:
    """Do as `check_and_wait`, awaited. Other requests of the event loop go on meanwhile."""
    crowded = prepared.may_wait()
    entered = crowded and waiters.enter()
    try:
        answer = await checking.acheck(identity, scope, method, costs, at_once=crowded and not entered)
        if answer.wait:
            try:
                await asyncio.sleep(answer.wait)
            except BaseException:
                await finishing.agive_back(answer)
                raise
        return answer
    finally:
        if entered:
            waiters.leave()
