"""One trace on fresh state of its own: lines in, outcomes out, in as few round trips as order allows."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from django.core.cache import caches
from django_redis.cache import RedisCache
from redis.exceptions import RedisError

from ratelimits.embedded import Server as EmbeddedServer
from ratelimits.engine.call import ANY, Call, Op
from ratelimits.engine.decide import Decision
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.limits import MICROSECONDS
from ratelimits.engine.program import Program, Term, program
from ratelimits.engine.replay import forget, replay
from ratelimits.engine.server import Server
from ratelimits.engine.wire import Unavailable, Wire
from ratelimits.simulate.lines import Line, Rules

#: Calls that travel in one round trip.
TOGETHER = 1000
_ALIAS = "ratelimits_simulate"
_PATIENCE = 60.0


@contextmanager
def sandbox(url: str | None = None) -> Iterator[Wire]:
    """A way to the server at `url` (default: REDIS_URL), else to an embedded one that ends with the block."""
    url = url or os.environ.get("REDIS_URL")
    if url:
        yield _wire(url)
        return
    with tempfile.TemporaryDirectory(prefix="ratelimits-") as directory:
        embedded = EmbeddedServer(Path(directory))
        try:
            yield _wire(embedded.url)
        finally:
            embedded.stop()


def _wire(url: str) -> Wire:
    caches[_ALIAS] = RedisCache(url, {})
    try:
        return Wire(_ALIAS, _PATIENCE)
    finally:
        del caches[_ALIAS]


def _decimal(us: int) -> str:
    """µs as seconds in JSON, with no digit that is not needed."""
    whole, part = divmod(us, MICROSECONDS)
    return f"{whole}.{part:06d}".rstrip("0") + ("" if part else "0")


class Outcome(NamedTuple):
    """The answer to one line. `at` as it was given; `wait`, `retry_after` (None: never) and `reset_after` in µs."""

    at: int | Decimal
    allowed: bool
    wait: int
    limit: int | float
    remaining: int
    retry_after: int | None
    reset_after: int

    def json(self) -> str:
        """One object of JSON, times in seconds."""
        retry_after = "null" if self.retry_after is None else _decimal(self.retry_after)
        return (
            f'{{"at": {self.at}, "allowed": {"true" if self.allowed else "false"}, "wait": {_decimal(self.wait)}, '
            f'"limit": {self.limit}, "remaining": {self.remaining}, "retry_after": {retry_after}, '
            f'"reset_after": {_decimal(self.reset_after)}}}'
        )


class Replay:
    """Replays lines against rules that are decided together; `close` leaves nothing of them behind."""

    def __init__(self, wire: Wire, rules: Rules) -> None:
        self._here = Server(wire, Keyspace(f"simulate-{secrets.token_hex(8)}", 1))
        self._keys: dict[str, None] = {}
        self._programs: list[Program] = []
        self._thread: ThreadPoolExecutor | None = None
        self.rules = rules
        self._take(rules)

    def _take(self, rules: Rules) -> None:
        self.rules = rules
        self._programs.append(program(tuple(Term(rule, str(place), 0, 0) for place, rule in enumerate(rules))))

    def _changes(self, line: Line, rules: Rules) -> Iterator[Call]:
        """What brings every key that was seen under new rules; another algorithm forgets what the old one knew."""
        terms = zip(self._programs[-1].terms, rules, strict=True)
        replaced = tuple(term for term, rule in terms if term.algorithm.id != rule.id)
        self._take(rules)
        for key in self._keys:
            if replaced:
                yield self._call(line, key, Op.RESET, 0, program(replaced))
            yield self._call(line, key, Op.CHANGE, 0)

    def run(self, lines: Iterable[Line]) -> Iterator[tuple[Line, Outcome]]:
        """Each line with its outcome, in order; lines are read ahead of outcomes, at most twice TOGETHER calls."""
        waiting: deque[tuple[list[tuple[Line, int]], Future[list[Decision]]]] = deque()
        answering: list[tuple[Line, int]] = []
        calls: list[Call] = []
        for line in lines:
            calls += self._calls(line)
            answering.append((line, len(calls) - 1))
            if len(calls) >= TOGETHER:
                # While the server decides on one lot, the next is read; a single thread keeps them in order.
                self._thread = self._thread or ThreadPoolExecutor(1)
                waiting.append((answering, self._thread.submit(replay, self._here, calls)))
                answering, calls = [], []
                if len(waiting) > 1:
                    yield from _outcomes(*waiting.popleft())
        while waiting:
            yield from _outcomes(*waiting.popleft())
        if calls:
            yield from _outcomes(answering, replay(self._here, calls))

    def _calls(self, line: Line) -> list[Call]:
        """The calls of one line; the last one answers it."""
        if line.rules is not None:
            return [*self._changes(line, line.rules), self._call(line, line.key, Op.PEEK, 0)]
        self._keys[line.key] = None
        return [self._call(line, line.key, line.op, line.cost)]

    def _call(self, line: Line, key: str, op: Op, cost: int, asked: Program | None = None) -> Call:
        timeout = ANY if line.timeout < 0 else line.timeout / MICROSECONDS
        return Call(
            asked or self._programs[-1],
            (key,),
            (cost,),
            timeout=timeout,
            now=line.now,
            op=op,
            lease="." + line.lease,
            virtual=True,
        )

    def close(self) -> None:
        """Forget every key, when nothing is under way any more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        nothing: dict[str, Any] = {"costs": (0,), "virtual": True}
        forget(self._here, [Call(each, (key,), **nothing) for each in self._programs for key in self._keys])

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RedisError as lost:
            # A server that went away has said so before.
            if error is None:
                raise Unavailable(str(lost)) from lost


def _outcomes(
    answering: list[tuple[Line, int]], asked: list[Decision] | Future[list[Decision]]
) -> Iterator[tuple[Line, Outcome]]:
    decisions = asked.result() if isinstance(asked, Future) else asked
    for line, number in answering:
        decision = decisions[number]
        _, allowed, _, remaining, retry_after, reset_after, wait = decision.reply[:7]
        limit = decision.limit
        assert limit is not None
        yield (
            line,
            Outcome(
                line.at,
                allowed == 1,
                wait if allowed else 0,
                limit,
                remaining,
                None if retry_after < 0 else retry_after,
                reset_after,
            ),
        )
