"""Run traces: send many commands at once to the real scripts, with a virtual clock.

Each trace begins without any state. A round trip contains the commands of many lines and traces.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from django.core.cache import caches
from django_redis.cache import RedisCache
from redis.exceptions import RedisError

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.embedded import EmbeddedServer, new_socket
from ratelimits.engine.assemble.scripts import Script, bulks
from ratelimits.engine.call import ANY, Call, Op
from ratelimits.engine.command import Command, further_keys, state_keys
from ratelimits.engine.decision import DECIDED, Stale
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Program, Term, program
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate.lines import Rules, TraceLine
from ratelimits.simulate.runs import Run

#: A command as bytes, and the script that it calls.
ReadyCommand = tuple[bytes, Script]
#: The numbers of a reply: DECIDED, allowed (1 or 0), the position of the binding limit (from 1; 0 if there is none),
#: remaining, retry_after (-1 if the request can never be admitted), reset_after, wait. Times are in µs.
Reply = tuple[int, ...]
# With a virtual clock, the script uses neither the nonce nor the run of the server. So these can have any value.
_NONCE, _RUN = b"0", "virtual"
#: The lease in the command from which a template is made. Each other command has its own lease in this place.
_LEASE = "."
#: Two arguments of a command: the nonce, and the text "<version of the rules> <run>". With version 0, the script does
#: not compare the version. These arguments stand between the Redis keys and the argument that describes the request.
_NONCE_AND_RUN = bulks(_NONCE, f"0 {_RUN}".encode())
# Each request has its own times and its own cost. In the argument that describes the request (ARGV[3] of
# lua/decide.lua), the times (now and timeout) are at the start, and the cost is at the end. All of them are doubles.
_TIMES = struct.Struct("<dd")
_COST = struct.Struct("<d")
#: The format of a reply with a decision: seven integers of 64 bits.
_DECIDED = struct.Struct("<7q")
#: The format of a stale reply: two integers of 64 bits.
_STALE = struct.Struct("<2q")
#: Number of commands in one round trip.
COMMANDS_AT_ONCE = 1000
_ALIAS = "ratelimits_simulate"
#: Timeout of the connections, in seconds.
_TIMEOUT = 60.0


class _Template:
    """The bytes that all commands of one operation have in common.

    A command consists of `name` (EVALSHA and the script), the Redis keys, `before`, the times, `between`, the cost,
    `after` and the lease.
    """

    __slots__ = ("after", "before", "between", "end", "fronts", "name", "script", "start")

    def __init__(self) -> None:
        #: The bytes of a command before the times, by limited key.
        self.fronts: dict[str, bytes] = {}
        self.name = self.before = self.between = self.after = b""
        self.script = Script(b"", b"")
        #: `between` and `after` are valid from the moment `start` until the moment `end` (both in µs).
        self.start, self.end = 0.0, 0.0


class CommandMaker:
    """Makes commands of a program with a virtual clock.

    Most bytes of a command are made only once. For each command, only the times, the key, the cost and the lease are
    put in. A command has one key and one cost. So all terms of the program must use the key and the cost with the
    index 0 (`Term.key` and `Term.slot`).
    """

    def __init__(self, keyspace: Keyspace, program: Program) -> None:
        self.program = program
        self._keyspace = keyspace
        self._templates: dict[Op, _Template] = {}
        self._leases = any(term.algorithm.leases for term in program.terms)

    def command(self, op: Op, key: str, cost: int, now: int, timeout: int = 0, lease: str = "") -> ReadyCommand:
        """Return a command. `now` and `timeout` are in µs. If `timeout` is -1, any wait of the request is accepted."""
        template = self._templates.get(op)
        if template is None or not template.start <= now < template.end:
            template = self._template(op, key, now)
        front = template.fronts.get(key)
        if front is None:
            front = template.fronts[key] = b"%b%b%b" % (template.name, bulks(*self._keys(key)), template.before)
        command = front + _TIMES.pack(now, timeout) + template.between + _COST.pack(cost) + template.after
        if self._leases:
            command += bulks(f".{lease}".encode())  # with a dot, because `lease` can be ""
        return command, template.script

    def _template(self, op: Op, key: str, now: int) -> _Template:
        """Return the template of an operation. It is made from the bytes of a complete command."""
        template = self._templates.setdefault(op, _Template())
        call = Call(self.program, (key,), (0,), timeout=ANY, now=now, op=op, lease=_LEASE, virtual=True)
        whole_command = Command(self._keyspace, call)
        whole, template.script = whole_command.to_bytes(_RUN, _NONCE), whole_command.script
        template.name, keys, rest = whole.partition(bulks(*self._keys(key)))
        unexpected, nonce_and_run, request = rest.partition(_NONCE_AND_RUN)
        size, newline, request = request.partition(b"\r\n")
        assert keys
        assert nonce_and_run
        assert not unexpected
        template.before = nonce_and_run + size + newline
        assert request.startswith(_TIMES.pack(now, -1))
        length = int(size[1:])  # `size` is "$" and a number
        template.between = request[_TIMES.size : length - _COST.size]
        template.after = request[length:]
        if self._leases:
            lease = bulks(_LEASE.encode())
            assert template.after.endswith(lease)
            template.after = template.after[: -len(lease)]
        packed = self.program.packed(now)
        template.start, template.end = packed.start, packed.end
        return template

    def _keys(self, key: str) -> list[bytes]:
        call = Call(self.program, (key,), (0,))
        return [name.encode() for name in (*self.state_keys(key), *further_keys(self._keyspace, call, [0]))]

    def state_keys(self, key: str) -> list[str]:
        """Return the Redis keys that store the states of a key."""
        return state_keys(self._keyspace, Call(self.program, (key,), (0,)), [0])


def _with_any_run(command: bytes, run: str) -> bytes:
    """Return the command unchanged. With a virtual clock, a command does not depend on the run of the server."""
    return command


def replay(server: Server, commands: Sequence[ReadyCommand]) -> list[Reply]:
    """Send commands in one round trip and return their replies, in order.

    Other code must not use the keys of these commands until the replies arrive. Raise Stale if a command's moment is
    not in the calendar window for which the command was made.
    """
    makers = [partial(_with_any_run, command) for command, _script in commands]
    packed_replies = server.wire.stream(makers, {script for _command, script in commands})
    unpack = _DECIDED.unpack_from
    replies = [unpack(raw) if len(raw) >= _DECIDED.size else _STALE.unpack_from(raw) for raw in packed_replies]
    for reply in replies:
        if reply[0] != DECIDED:
            _stale, server_time = reply[:2]
            raise Stale(0, server_time)  # 0: the rules are not too old, only their calendar windows
    return replies


@contextmanager
def sandbox(url: str | None = None) -> Iterator[Wire]:
    """Yield connections to the server at `url`. The default is the environment variable `REDIS_URL`.

    If neither is set, start an embedded server, and stop it at the end of the `with` block.
    """
    url = url or os.environ.get("REDIS_URL")
    if url:
        yield _wire(url)
        return
    path = new_socket()
    try:
        embedded = EmbeddedServer(path.parent, path=path)
        try:
            yield _wire(embedded.url)
        finally:
            embedded.stop()
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


def _wire(url: str) -> Wire:
    # While a Wire is made, it finds its server by the alias of a cache. Later it does not need the alias.
    caches[_ALIAS] = RedisCache(url, {})
    try:
        return Wire(_ALIAS, _TIMEOUT)
    finally:
        del caches[_ALIAS]


def _decimal(us: int) -> str:
    """Return a number of µs as a JSON number of seconds, such as "1.5" or "2.0"."""
    if us == 0:
        return "0.0"
    if 100 <= us < 10**15:
        # The number has at most 15 digits. So `repr` of this float gives exactly these digits, without an exponent.
        return repr(us / MICROSECONDS)
    seconds, fraction = divmod(us, MICROSECONDS)
    return f"{seconds}.{fraction:06d}".rstrip("0") + ("" if fraction else "0")


class LineOutcome(NamedTuple):
    """The result of one line.

    at                              the moment in seconds, as it is written in the line
    limit                           the number that a decision reports as `limit`, such as the capacity
    wait, retry_after, reset_after  in µs. `retry_after` is None if the request can never be admitted
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
    """Turns the lines of one trace into commands. All rules of the trace make one decision together."""

    def __init__(self, rules: Rules, prefix: str = "") -> None:
        """Begin a replay. Its keys start with `prefix`. Two replays of a simulator must not have the same prefix."""
        self._prefix = prefix
        #: The keys that were used so far. The values have no meaning: the dict is a set that keeps the order.
        self._keys: dict[str, None] = {}
        self._rules = rules
        #: One maker for each version of the rules, the current one last.
        self._makers: list[CommandMaker] = []
        #: The Redis keys of states that `commands` uses for the first time, until `take_new` returns them.
        self._new: list[str] = []
        #: The number that each rule reports as `limit`.
        self.limits_shown = tuple(rule.shown_limit for rule in rules)

    def _use_rules(self, keyspace: Keyspace, rules: Rules) -> None:
        # The two zeros are indexes: a command has only one key and one cost, and all terms use them.
        terms = tuple(Term(rule, str(number), 0, 0) for number, rule in enumerate(rules))
        self._makers.append(CommandMaker(keyspace, program(terms)))
        self._rules, self.limits_shown = rules, tuple(rule.shown_limit for rule in rules)

    def commands(self, line: TraceLine, keyspace: Keyspace) -> list[ReadyCommand]:
        """Return the commands for a line. The reply to the last command has the result of the line."""
        if not self._makers:
            self._use_rules(keyspace, self._rules)
        key = self._prefix + line.key
        if line.rules is not None:
            changes = list(self._changes(line, line.rules, keyspace))
            return [*changes, self._makers[-1].command(Op.PEEK, key, 0, line.now)]
        if key not in self._keys:
            self._keys[key] = None
            self._new += self._makers[-1].state_keys(key)
        return [self._makers[-1].command(line.op, key, line.cost, line.now, line.timeout, line.lease)]

    def _changes(self, line: TraceLine, rules: Rules, keyspace: Keyspace) -> Iterator[ReadyCommand]:
        """Yield the commands that change the rules, for every key that was used so far.

        If a rule gets another algorithm, the states of the former algorithm are deleted.
        """
        terms = zip(self._makers[-1].program.terms, rules, strict=True)
        replaced = tuple(term for term, rule in terms if term.algorithm.id != rule.id)
        resetting = CommandMaker(keyspace, program(replaced)) if replaced else None
        self._use_rules(keyspace, rules)
        for key in self._keys:
            if resetting is not None:
                self._new += self._makers[-1].state_keys(key)
                yield resetting.command(Op.RESET, key, 0, line.now)
            yield self._makers[-1].command(Op.CHANGE, key, 0, line.now)

    def take_new(self) -> list[str]:
        """Return the Redis keys of the states that the last commands can write, and that no earlier ones could."""
        new, self._new = self._new, []
        return new

    def state_keys(self) -> Iterator[str]:
        """Return the Redis keys of all states that this replay can have written."""
        # The keys depend only on the algorithms of the rules. So take one maker for each combination of algorithms.
        makers = {tuple(term.algorithm.id for term in maker.program.terms): maker for maker in self._makers}
        return (state for maker in makers.values() for key in self._keys for state in maker.state_keys(key))


#: Lines whose replies have not arrived. For each line: its replay, the line, the index of its last command in the round
#: trip, and the number that each of its rules reports as `limit`.
AwaitedLines = list[tuple[Replay, TraceLine, int, tuple[int | float, ...]]]


class Simulator:
    """Runs replays on a server. The Redis keys of a simulator have their own namespace. `close` deletes them.

    If the process is killed before, another process deletes them: see runs.py.
    """

    def __init__(self, wire: Wire) -> None:
        self._run = Run(wire)
        self._server = Server(self._run.wire, self._run.keyspace)
        self._thread: ThreadPoolExecutor | None = None
        #: The replays whose states are not deleted yet, as a set that keeps the order.
        self._replays: dict[Replay, None] = {}

    def run(self, lines: Iterable[tuple[Replay, TraceLine]]) -> Iterator[tuple[Replay, TraceLine, LineOutcome]]:
        """Yield each line with its result, in order.

        The first result comes after about `2 * COMMANDS_AT_ONCE` commands, or at the end of the lines. At the end,
        raise Unavailable if the states were perhaps deleted meanwhile.
        """
        sent: deque[tuple[AwaitedLines, Future[list[Reply]]]] = deque()
        awaited: AwaitedLines = []
        commands: list[ReadyCommand] = []
        names: list[str] = []
        keyspace = self._server.keyspace
        for line_replay, line in lines:
            self._replays[line_replay] = None
            commands += line_replay.commands(line, keyspace)
            names += line_replay.take_new()
            awaited.append((line_replay, line, len(commands) - 1, line_replay.limits_shown))
            if len(commands) >= COMMANDS_AT_ONCE:
                # Make the next commands while the server decides these commands. A single thread keeps the order.
                self._thread = self._thread or ThreadPoolExecutor(1)
                sent.append((awaited, self._thread.submit(self._send, names, commands)))
                awaited, commands, names = [], [], []
                if len(sent) > 1:
                    yield from _outcomes(*sent.popleft())
        while sent:
            yield from _outcomes(*sent.popleft())
        if commands:
            yield from _outcomes(awaited, self._send(names, commands))
        self._run.check()

    def _send(self, names: list[str], commands: list[ReadyCommand]) -> list[Reply]:
        """Send commands, and return their replies. `names` are the Redis keys of the states that they write newly."""
        if names:
            try:
                self._run.note(names)
            except RedisError as error:
                raise Unavailable(str(error)) from error
        return replay(self._server, commands)

    def forget(self, replays: Iterable[Replay]) -> None:
        """Delete the states of finished replays."""
        self._run.forget([key for finished in replays for key in finished.state_keys()])
        for finished in replays:
            self._replays.pop(finished, None)

    def close(self) -> None:
        """Wait for the replies to commands that were sent. Then delete all states."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.forget(list(self._replays))
        self._run.end()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except RedisError as lost:
            # If the `with` block has raised an error, do not hide it behind this error.
            if error is None:
                raise Unavailable(str(lost)) from lost


def _outcomes(
    awaited: AwaitedLines, replies: list[Reply] | Future[list[Reply]]
) -> Iterator[tuple[Replay, TraceLine, LineOutcome]]:
    arrived = replies.result() if isinstance(replies, Future) else replies
    for line_replay, line, command_index, limits_shown in awaited:
        _decided, allowed, binding, remaining, retry_after, reset_after, wait = arrived[command_index]
        outcome = LineOutcome(
            line.at,
            allowed == 1,
            wait,
            limits_shown[binding - 1],  # `binding` counts from 1. If no limit is binding, it is 0: take the last limit.
            remaining,
            None if retry_after < 0 else retry_after,
            reset_after,
        )
        yield line_replay, line, outcome
