"""Holding requests back at the HTTP face: how many may wait in this process at once, and the wait itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping

from ratelimits import finishing, quota, routes
from ratelimits.conf import conf
from ratelimits.identity import Identity
from ratelimits.quota import Answer


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


def check_and_wait(identity: Identity, scope: str, method: str, costs: Mapping[str, int]) -> Answer:
    """`quota.check`, and, when the rules grant the request for later, the wait.

    Beyond MAX_WAITING requests that wait in this process, one that would have to is refused, uncharged. One whose wait
    is interrupted, by a client that hangs up for instance, is given back as if it had never been.
    """
    # Where nothing waits no place is needed; an edit under way may still make this one wait.
    crowded = routes.may_wait()
    entered = crowded and waiters.enter()
    try:
        answer = quota.check(identity, scope, method, costs, at_once=crowded and not entered)
        if answer.wait:
            try:
                time.sleep(answer.wait)
            except BaseException:
                finishing.give_back(answer)
                raise
        return answer
    finally:
        if entered:
            waiters.leave()


async def acheck_and_wait(identity: Identity, scope: str, method: str, costs: Mapping[str, int]) -> Answer:
    """`check_and_wait`, awaited: other requests of the event loop go on meanwhile."""
    crowded = routes.may_wait()
    entered = crowded and waiters.enter()
    try:
        answer = await quota.acheck(identity, scope, method, costs, at_once=crowded and not entered)
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
