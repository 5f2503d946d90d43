"""Run traces, each with its own new state, in as few round trips as possible."""

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

from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.call import Op
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate.batch import CommandMaker, ReadyCommand, Reply, forget, replay
from ratelimits.simulate.lines import Rules, TraceLine

#: Number of commands in one round trip.
TOGETHER = 1000
_ALIAS = "ratelimits_simulate"
_PATIENCE = 60.0


@contextmanager
def sandbox(url: str | None = None) -> Iterator[Wire]:
    """Yield connections to the server at `url` (default: REDIS_URL).

    Without one, start an embedded server for the block.
    """
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
    """Return µs as seconds in JSON, without superfluous zeros."""
    if us == 0:
        return "0.0"
    if 100 <= us < 10**15:
        # With at most 15 digits, the shortest text of this double is the decimal itself, without an exponent.
        return repr(us / MICROSECONDS)
    whole, part = divmod(us, MICROSECONDS)
    return f"{whole}.{part:06d}".rstrip("0") + ("" if part else "0")


class LineOutcome(NamedTuple):
    """The result of one line.

    `at` is as it was written; `wait`, `retry_after` (None: never) and `reset_after` are in µs.
    """

    at: int | Decimal
    allowed: bool
    wait: int
    limit: int | float
    remaining: int
    retry_after: int | None
    reset_after: int

    def json(self) -> str:
        """Return the outcome as a JSON object, with times in seconds."""
        retry_after = "null" if self.retry_after is None else _decimal(self.retry_after)
        return (
            f'{{"at": {self.at}, "allowed": {"true" if self.allowed else "false"}, "wait": {_decimal(self.wait)}, '
            f'"limit": {self.limit}, "remaining": {self.remaining}, "retry_after": {retry_after}, '
            f'"reset_after": {_decimal(self.reset_after)}}}'
        )


class Replay:
    """Turns the lines of one trace into commands. Its rules are decided together, on a state of its own."""

    def __init__(self, rules: Rules, prefix: str = "") -> None:
        """Begin a replay. `prefix` is part of its keys; no other replay of the simulator may have the same one."""
        self._prefix = prefix
        self._keys: dict[str, None] = {}
        self._rules = rules
        self._makers: list[CommandMaker] = []
        #: The numbers that the rules report as `limit`.
        self.shown = tuple(rule.shown for rule in rules)

    def _take(self, keyspace: Keyspace, rules: Rules) -> None:
        terms = tuple(Term(rule, str(place), 0, 0) for place, rule in enumerate(rules))
        self._makers.append(CommandMaker(keyspace, program(terms)))
        self._rules, self.shown = rules, tuple(rule.shown for rule in rules)

    def commands(self, line: TraceLine, keyspace: Keyspace) -> list[ReadyCommand]:
        """Return the commands for one line. The reply to the last command is the result of the line."""
        if not self._makers:
            self._take(keyspace, self._rules)
        key = self._prefix + line.key
        if line.rules is not None:
            changes = [*self._changes(line, line.rules, keyspace)]
            return [*changes, self._makers[-1].command(Op.PEEK, key, 0, line.now)]
        self._keys[key] = None
        return [self._makers[-1].command(line.op, key, line.cost, line.now, line.timeout, line.lease)]

    def _changes(self, line: TraceLine, rules: Rules, keyspace: Keyspace) -> Iterator[ReadyCommand]:
        """Yield the commands that change the rules of every key used so far.

        States of a replaced algorithm are deleted.
        """
        terms = zip(self._makers[-1].program.terms, rules, strict=True)
        replaced = tuple(term for term, rule in terms if term.algorithm.id != rule.id)
        resetting = CommandMaker(keyspace, program(replaced)) if replaced else None
        self._take(keyspace, rules)
        for key in self._keys:
            if resetting is not None:
                yield resetting.command(Op.RESET, key, 0, line.now)
            yield self._makers[-1].command(Op.CHANGE, key, 0, line.now)

    def state_keys(self) -> Iterator[str]:
        """Yield the Redis keys of all states that this replay may have written."""
        # Rules of the same algorithms have the same keys, however often their numbers change.
        kinds = {tuple(term.algorithm.id for term in maker.program.terms): maker for maker in self._makers}
        return (state for maker in kinds.values() for key in self._keys for state in maker.state_keys(key))


#: Lines, each with the index of its last command and the limits that it shows.
AwaitedLines = list[tuple[Replay, TraceLine, int, tuple[int | float, ...]]]


class Simulator:
    """Runs replays on a server, in its own namespace. `close` deletes everything that was written."""

    def __init__(self, wire: Wire) -> None:
        keyspace = Keyspace(f"simulate-{secrets.token_hex(8)}", 1)
        # On a cluster, the node that has the only shard.
        self._server = Server(wire.wire_of(keyspace, 0), keyspace)
        self._thread: ThreadPoolExecutor | None = None
        self._replays: dict[Replay, None] = {}

    def run(self, lines: Iterable[tuple[Replay, TraceLine]]) -> Iterator[tuple[Replay, TraceLine, LineOutcome]]:
        """Yield each line with its result, in order.

        At most 2 * TOGETHER commands are prepared before a result is yielded.
        """
        waiting: deque[tuple[AwaitedLines, Future[list[Reply]]]] = deque()
        awaited: AwaitedLines = []
        commands: list[ReadyCommand] = []
        keyspace = self._server.keyspace
        for one, line in lines:
            self._replays[one] = None
            commands += one.commands(line, keyspace)
            awaited.append((one, line, len(commands) - 1, one.shown))
            if len(commands) >= TOGETHER:
                # Prepare the next commands while the server decides these. A single thread keeps them in order.
                self._thread = self._thread or ThreadPoolExecutor(1)
                waiting.append((awaited, self._thread.submit(replay, self._server, commands)))
                awaited, commands = [], []
                if len(waiting) > 1:
                    yield from _outcomes(*waiting.popleft())
        while waiting:
            yield from _outcomes(*waiting.popleft())
        if commands:
            yield from _outcomes(awaited, replay(self._server, commands))

    def forget(self, replays: Iterable[Replay]) -> None:
        """Delete the states of finished replays."""
        forget(self._server, [state for one in replays for state in one.state_keys()])
        for one in replays:
            self._replays.pop(one, None)

    def close(self) -> None:
        """Wait for replies that have not arrived yet, then delete all states."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.forget(list(self._replays))

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RedisError as lost:
            # Do not hide an earlier error, which says already that the server does not answer.
            if error is None:
                raise Unavailable(str(lost)) from lost


def _outcomes(
    awaited: AwaitedLines, replies: list[Reply] | Future[list[Reply]]
) -> Iterator[tuple[Replay, TraceLine, LineOutcome]]:
    read = replies.result() if isinstance(replies, Future) else replies
    for one, line, number, shown in awaited:
        _, allowed, binding, remaining, retry_after, reset_after, wait = read[number]
        outcome = LineOutcome(
            line.at,
            allowed == 1,
            wait,
            shown[binding - 1],
            remaining,
            None if retry_after < 0 else retry_after,
            reset_after,
        )
        yield one, line, outcome
