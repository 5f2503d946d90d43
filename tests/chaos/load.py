"""Ask `quota` for decisions at a steady pace from threads and from tasks of one event loop, and note each answer."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from django.db import connections

from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.quota.answers.answer import Answer

#: Seconds between two requests of one thread or task.
PAUSE = 0.01
THREADS = 4
TASKS = 8
#: The scope whose rule all requests share, and the scope whose rule refuses nothing.
TIGHT, WIDE = "tight", "wide"


@dataclass(frozen=True, slots=True)
class Request:
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
    """The requests of a block."""

    seed: int
    requests: list[Request] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Make requests until the block is left."""
        threads = [threading.Thread(target=self._thread, args=(number,)) for number in range(THREADS)]
        threads.append(threading.Thread(target=lambda: asyncio.run(self._tasks())))
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def wait(self, seconds: float) -> None:
        """Let the load go on for some time."""
        self._end.wait(seconds)

    def _thread(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:{number}")
        try:
            while not self._end.is_set():
                identity, scope = _drawn(rng, f"t{number}")
                began, clock = time.monotonic(), time.perf_counter()
                try:
                    answer: Answer | BaseException = checking.check(identity, scope, "GET")
                except Exception as error:  # noqa: BLE001  (the server would answer it with 500)
                    answer = error
                self._note(began, time.perf_counter() - clock, scope, identity, answer)
                time.sleep(PAUSE)
        finally:
            connections.close_all()

    async def _tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS):
                group.create_task(self._task(number))

    async def _task(self, number: int) -> None:
        rng = random.Random(f"{self.seed}:a{number}")
        while not self._end.is_set():
            identity, scope = _drawn(rng, f"a{number}")
            began, clock = time.monotonic(), time.perf_counter()
            try:
                answer: Answer | BaseException = await checking.acheck(identity, scope, "GET")
            except Exception as error:  # noqa: BLE001  (the server would answer it with 500)
                answer = error
            self._note(began, time.perf_counter() - clock, scope, identity, answer)
            await asyncio.sleep(PAUSE)

    def _note(
        self, began: float, seconds: float, scope: str, identity: Identity, answer: Answer | BaseException
    ) -> None:
        key = identity.user or ""
        if isinstance(answer, BaseException):
            self.errors.append(answer)
            self.requests.append(Request(began, seconds, scope, key, "raised"))
            return
        if answer.decision is None:
            outcome = "passed" if answer.allowed else "denied"
            self.requests.append(Request(began, seconds, scope, key, outcome))
            return
        outcome = "admitted" if answer.allowed else "refused"
        receipt = answer.decision.receipt
        self.requests.append(Request(began, seconds, scope, key, outcome, receipt.at if receipt is not None else 0))

    def counted(self, outcome: str, scope: str | None = None) -> Counter[str]:
        """Return the number of requests with this outcome, by key."""
        wanted = (one for one in self.requests if one.outcome == outcome and scope in (None, one.scope))
        return Counter(one.key for one in wanted)


def _drawn(rng: random.Random, who: str) -> tuple[Identity, str]:
    user = f"user:{who}-{rng.randrange(5)}"
    return Identity(user=user, account=f"account:{who}"), rng.choice((TIGHT, WIDE, WIDE))
