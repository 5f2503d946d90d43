"""Ask `quota` for decisions at a steady pace, from threads, from tasks of one event loop and from other processes.

The answer of each request is noted.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db import connections

from ratelimits.answers.answer import Answer
from ratelimits.engine.call import ANONYMOUS_KEY
from ratelimits.identity import Identity
from ratelimits.quota import checking
from tests.support.eventually import PATIENCE, until
from tests.support.forked import Forked

#: The setting TIMEOUT, in seconds.
TIMEOUT = 0.25
#: Seconds between two requests of one caller, unless a load has another pause.
PAUSE = 0.01
THREADS = 4
TASKS = 8
PROCESSES = 2
CALLERS = THREADS + TASKS + PROCESSES
#: The number of users of each caller.
USERS = 5
#: The scope whose rule all requests share, and the scope whose rule refuses nothing.
TIGHT, WIDE = "tight", "wide"
#: The scope of requests that the load does not make: a fault makes them.
FLOOD = "flood"


class Request(NamedTuple):
    """One request: when it began and how long it took (seconds), and what became of it.

    outcome  "admitted" or "refused" by a decision, "passed" or "denied" by a failure policy, "raised" for an exception
    at       the moment of the decision by the server's clock, in µs since 1970 UTC; 0 without a decision
    """

    began: float
    seconds: float
    scope: str
    key: str
    outcome: str
    at: int = 0


@dataclass
class Load:
    """The requests of a block.

    pause        seconds between two requests of one caller
    environment  the environment of the other processes (tests.chaos.asker); without it, there are none
    """

    seed: int
    pause: float = PAUSE
    environment: dict[str, str] | None = None
    requests: list[Request] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)
    _rests: bool = False

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Make requests until the block is left."""
        threads = [threading.Thread(target=self._thread, args=(number,)) for number in range(THREADS)]
        threads.append(threading.Thread(target=lambda: asyncio.run(self._tasks())))
        with self._processes() if self.environment is not None else _nothing():
            began = time.monotonic()
            for thread in threads:
                thread.start()
            try:
                yield self
            finally:
                self._end.set()
                for thread in threads:
                    thread.join()
        self.seconds = time.monotonic() - began

    @contextmanager
    def _processes(self) -> Iterator[None]:
        """Let other processes make requests, from before the block until its end."""
        command = [sys.executable, "-m", "tests.chaos.asker", str(self.seed), str(PROCESSES), str(self.pause)]
        started = threading.Semaphore(0)
        with Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment, text=True) as askers:
            reader = threading.Thread(target=self._read, args=(askers, started))
            reader.start()
            try:
                for _ in range(PROCESSES):
                    assert started.acquire(timeout=PATIENCE), "the other processes began"
                yield
            finally:
                assert askers.stdin is not None
                askers.stdin.close()
                reader.join()
        assert askers.returncode == 0, askers.returncode

    def _read(self, askers: subprocess.Popen[str], started: threading.Semaphore) -> None:
        assert askers.stdout is not None
        for line in askers.stdout:
            kind, *values = json.loads(line)
            if kind == "request":
                self.requests.append(Request(*values))
            elif kind == "error":
                self.errors.append(values[0])
            else:
                started.release()

    def wait(self, seconds: float) -> None:
        """Let the load go on for some time."""
        self._end.wait(seconds)

    def rest(self, seconds: float) -> None:
        """Let the threads and tasks make no requests for some time. The other processes go on."""
        self._rests = True
        self._end.wait(seconds)
        self._rests = False

    def _is_over(self) -> bool:
        while self._rests:
            time.sleep(self.pause)
        return self._end.is_set()

    def wait_for_all_keys(self) -> None:
        """Let the load go on until there was a decision about each user, so that all their rows were read."""
        users = CALLERS * USERS
        until(lambda: len({one.key for one in [*self.requests] if one.at}) == users, "each user was decided about")

    def _thread(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        try:
            ask(rng, f"t{number}", self.pause, self._is_over, self.requests.append, self.errors.append)
        finally:
            connections.close_all()

    async def _tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS):
                group.create_task(self._task(number))

    async def _task(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:a{number}")
        while not self._end.is_set():
            if self._rests:
                await asyncio.sleep(self.pause)
                continue
            identity, scope = _drawn(rng, f"a{number}")
            began = time.monotonic()
            try:
                answer: Answer | BaseException = await checking.acheck(identity, scope, "GET")
            except Exception as error:  # noqa: BLE001  (the server would answer it with 500)
                answer = error
                self.errors.append(repr(error))
            self.requests.append(request_of(began, scope, identity, answer))
            await asyncio.sleep(self.pause)

    def counted(self, outcome: str, scope: str | None = None) -> Counter[str]:
        """Return the number of requests with this outcome, by key."""
        wanted = (one for one in self.requests if one.outcome == outcome and scope in (None, one.scope))
        return Counter(one.key for one in wanted)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def ask(
    rng: random.Random,
    who: str,
    pause: float,
    ended: Callable[[], bool],
    note: Callable[[Request], object],
    note_error: Callable[[str], object],
) -> None:
    """Make requests one after the other until `ended` is true, and note each of them."""
    while not ended():
        identity, scope = _drawn(rng, who)
        began = time.monotonic()
        try:
            answer: Answer | BaseException = checking.check(identity, scope, "GET")
        except Exception as error:  # noqa: BLE001  (the server would answer it with 500)
            answer = error
            note_error(repr(error))
        note(request_of(began, scope, identity, answer))
        time.sleep(pause)


def request_of(began: float, scope: str, identity: Identity, answer: Answer | BaseException) -> Request:
    """Return a request that began at this moment (s, monotonic), and ended now."""
    seconds, key = time.monotonic() - began, identity.user or ANONYMOUS_KEY
    if isinstance(answer, BaseException):
        return Request(began, seconds, scope, key, "raised")
    if answer.decision is None:
        return Request(began, seconds, scope, key, "passed" if answer.allowed else "denied")
    decision = answer.decision
    # On a cluster, the decision also says when the shard of each key decided. The requests of a scope share one key.
    at = (*decision.reply[9 + 3 * len(decision.program.terms) :], decision.reply[7])[0]
    return Request(began, seconds, scope, key, "admitted" if answer.allowed else "refused", at)


def _drawn(rng: random.Random, who: str) -> tuple[Identity, str]:
    user = f"user:{who}-{rng.randrange(USERS)}"
    return Identity(user=user, account=f"account:{who}"), rng.choice((TIGHT, WIDE, WIDE))
