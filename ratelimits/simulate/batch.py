"""Send many commands at once to the real scripts, with a virtual clock, for the simulator."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import partial

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.engine.assemble.scripts import Script
from ratelimits.engine.call import ANY, Call, Op
from ratelimits.engine.command import Command, further_keys, state_keys
from ratelimits.engine.decision import DECIDED, Stale
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Program
from ratelimits.engine.resp import bulks
from ratelimits.engine.server import Server

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


def forget(server: Server, keys: Iterable[str]) -> None:
    """Delete the states with these Redis keys, and the further Redis keys of their limits."""
    endings = {"", *(ending for kind in ALGORITHMS.values() for ending in kind.storage.endings.values())}
    deleted = sorted({key + ending for key in keys for ending in endings})
    for start in range(0, len(deleted), 1000):
        server.wire.client.unlink(*deleted[start : start + 1000])
