"""Holding requests back at the HTTP face: how many may wait in this process at once, and the wait itself."""

from __future__ import annotations

import asyncio
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
        self._lock = threading.Lock()
        self._count = 0

    def enter(self) -> bool:
        """Take a place; False when MAX_WAITING are taken."""
        with self._lock:
            if self._count >= conf.MAX_WAITING:
                return False
            self._count += 1
            return True

    def leave(self) -> None:
        """Give the place back."""
        with self._lock:
            self._count -= 1


waiters = Waiters()


def check_and_wait(
    identity: Identity, scope: str, method: str, costs: Mapping[str, int], request: HttpRequest | None = None
) -> Answer:
    """`quota.check`, and, when the rules grant the request for later, the wait.

    Beyond MAX_WAITING requests that wait in this process, one that would have to is refused, uncharged. One whose wait
    is interrupted is given back as if it had never been. `request` is Django's: if its client goes away meanwhile, the
    wait ends and asyncio.CancelledError is raised, so that the view does not run.
    """
    # Where nothing waits no place is needed; an edit under way may still make this one wait.
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
        # Of a sync view whose request is cancelled, asgiref cancels what its thread awaits; sleep would go on.
        async_to_sync(_ahold_back)(seconds, request)
    else:
        time.sleep(seconds)


async def _ahold_back(seconds: float, request: HttpRequest) -> None:
    # A request that was cancelled before this task began will not cancel it.
    if finishing.is_abandoned(request):
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


def _runs_a_loop() -> bool:
    """Return whether this thread runs an event loop, which nothing can be awaited in from here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def acheck_and_wait(identity: Identity, scope: str, method: str, costs: Mapping[str, int]) -> Answer:
    """`check_and_wait`, awaited: other requests of the event loop go on meanwhile."""
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
