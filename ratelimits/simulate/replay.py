"""Traces on fresh state of their own: lines in, outcomes out, in as few round trips as order allows."""

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
from typing import NamedTuple

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
    """One trace against rules that are decided together, on state of its own: lines in, calls out."""

    def __init__(self, rules: Rules, prefix: str = "") -> None:
        """`prefix` is part of its keys, and of no other replay's of the same simulator."""
        self._prefix = prefix
        self._keys: dict[str, None] = {}
        self._programs: list[Program] = []
        self._take(rules)

    def _take(self, rules: Rules) -> None:
        self._programs.append(program(tuple(Term(rule, str(place), 0, 0) for place, rule in enumerate(rules))))

    def calls(self, line: Line) -> list[Call]:
        """What one line asks; the answer to the last call is the line's."""
        key = self._prefix + line.key
        if line.rules is not None:
            return [*self._changes(line, line.rules), self._call(line, key, Op.PEEK, 0)]
        self._keys[key] = None
        return [self._call(line, key, line.op, line.cost)]

    def _changes(self, line: Line, rules: Rules) -> Iterator[Call]:
        """What brings every key that was seen under new rules; another algorithm forgets what the old one knew."""
        terms = zip(self._programs[-1].terms, rules, strict=True)
        replaced = tuple(term for term, rule in terms if term.algorithm.id != rule.id)
        self._take(rules)
        for key in self._keys:
            if replaced:
                yield self._call(line, key, Op.RESET, 0, program(replaced))
            yield self._call(line, key, Op.CHANGE, 0)

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

    def touched(self) -> Iterator[Call]:
        """Calls of all states that this replay may have left."""
        return (Call(each, (key,), (0,), virtual=True) for each in self._programs for key in self._keys)


Asked = list[tuple[Replay, Line, int]]


class Simulator:
    """Replays on a server, in a namespace of its own; `close` leaves nothing behind."""

    def __init__(self, wire: Wire) -> None:
        self._here = Server(wire, Keyspace(f"simulate-{secrets.token_hex(8)}", 1))
        self._thread: ThreadPoolExecutor | None = None
        self._replays: dict[Replay, None] = {}

    def run(self, lines: Iterable[tuple[Replay, Line]]) -> Iterator[tuple[Replay, Line, Outcome]]:
        """Each line with its outcome, in order; lines are read ahead of outcomes, at most twice TOGETHER calls."""
        waiting: deque[tuple[Asked, Future[list[Decision]]]] = deque()
        asked: Asked = []
        calls: list[Call] = []
        for one, line in lines:
            self._replays[one] = None
            calls += one.calls(line)
            asked.append((one, line, len(calls) - 1))
            if len(calls) >= TOGETHER:
                # While the server decides on one lot, the next is read; a single thread keeps them in order.
                self._thread = self._thread or ThreadPoolExecutor(1)
                waiting.append((asked, self._thread.submit(replay, self._here, calls)))
                asked, calls = [], []
                if len(waiting) > 1:
                    yield from _outcomes(*waiting.popleft())
        while waiting:
            yield from _outcomes(*waiting.popleft())
        if calls:
            yield from _outcomes(asked, replay(self._here, calls))

    def forget(self, replays: Iterable[Replay]) -> None:
        """Leave nothing of finished replays behind."""
        forget(self._here, [call for one in replays for call in one.touched()])
        for one in replays:
            self._replays.pop(one, None)

    def close(self) -> None:
        """Forget everything, when nothing is under way any more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.forget(list(self._replays))

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RedisError as lost:
            # A server that went away has said so before.
            if error is None:
                raise Unavailable(str(lost)) from lost


def _outcomes(asked: Asked, answers: list[Decision] | Future[list[Decision]]) -> Iterator[tuple[Replay, Line, Outcome]]:
    decisions = answers.result() if isinstance(answers, Future) else answers
    for one, line, number in asked:
        decision = decisions[number]
        _, allowed, _, remaining, retry_after, reset_after, wait = decision.reply[:7]
        limit = decision.limit
        assert limit is not None
        told = Outcome(
            line.at,
            allowed == 1,
            wait if allowed else 0,
            limit,
            remaining,
            None if retry_after < 0 else retry_after,
            reset_after,
        )
        yield one, line, told
