"""Make many decisions in a row with the real scripts and a virtual clock, for the simulator."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import partial

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.engine.call import ANY, Call, Command, Op, further_keys, state_keys
from ratelimits.engine.decision import Stale
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Program
from ratelimits.engine.resp import bulks
from ratelimits.engine.scripts import Script
from ratelimits.engine.server import Server

#: A command as bytes, and the script that it calls.
ReadyCommand = tuple[bytes, Script]
#: 1, allowed, binding limit (0 none), remaining, retry_after (-1 never), reset_after, wait; times in µs.
Reply = tuple[int, ...]

# With a virtual clock the script uses neither the nonce nor the run of the server, so any value will do.
_NONCE, _RUN, _LEASE = b"0", "virtual", "."
_BEFORE = bulks(_NONCE, f"0 {_RUN}".encode())
# The parts of a request that change from one to the next, as lua/decide.lua reads them: now and timeout after five
# bytes, and the cost at the end.
_TIMES, _COST, _TIMES_AT = struct.Struct("<dd"), struct.Struct("<d"), 5
_ANSWER = struct.Struct("<7q")
_REFUSED = struct.Struct("<2q")


class _Template:
    """Bytes that commands of one operation have in common: before the times, after the times, after the cost."""

    __slots__ = ("after", "before", "between", "end", "fronts", "name", "start")

    def __init__(self) -> None:
        #: For each key, the bytes of a command before the times.
        self.fronts: dict[str, bytes] = {}
        self.name = self.before = self.between = self.after = b""
        #: The moments (µs) between which `between` and `after` are valid.
        self.start, self.end = 0.0, 0.0


class CommandMaker:
    """Makes commands of a program with a virtual clock.

    Most bytes are made once; only times, key, cost and lease change. All terms of the program have the key 0 and the
    slot 0.
    """

    def __init__(self, keyspace: Keyspace, program: Program) -> None:
        self.program = program
        self._keyspace = keyspace
        self._templates: dict[Op, _Template] = {}
        self._leases = any(term.algorithm.leases for term in program.terms)

    def command(self, op: Op, key: str, cost: int, now: int, timeout: int = 0, lease: str = "") -> ReadyCommand:
        """Return one command. `now` and `timeout` (-1: any) are in µs. A `lease` of "" is a valid name."""
        template = self._templates.get(op)
        if template is None or not template.start <= now < template.end:
            template = self._template(op, key, now)
        front = template.fronts.get(key)
        if front is None:
            front = template.fronts[key] = b"%b%b%b" % (template.name, bulks(*self._keys(key)), template.before)
        command = front + _TIMES.pack(now, timeout) + template.between + _COST.pack(cost) + template.after
        if self._leases:
            command += bulks(f".{lease}".encode())
        return command, self.program.script

    def _template(self, op: Op, key: str, now: int) -> _Template:
        """Make a template from the bytes of a complete command."""
        template = self._templates.setdefault(op, _Template())
        call = Call(self.program, (key,), (0,), timeout=ANY, now=now, op=op, lease=_LEASE, virtual=True)
        whole = Command(self._keyspace, call).to(_RUN, _NONCE)
        template.name, keys, rest = whole.partition(bulks(*self._keys(key)))
        before, nonce, request = rest.partition(_BEFORE)
        size, line, request = request.partition(b"\r\n")
        assert keys
        assert nonce
        assert not before
        template.before = nonce + size + line + request[:_TIMES_AT]
        length, times = int(size[1:]), request[_TIMES_AT : _TIMES_AT + _TIMES.size]
        assert times == _TIMES.pack(now, -1)
        template.between = request[_TIMES_AT + _TIMES.size : length - _COST.size]
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
        return [one.encode() for one in (*self.state_keys(key), *further_keys(self._keyspace, call, [0]))]

    def state_keys(self, key: str) -> list[str]:
        """Return the Redis keys of a key's states."""
        return state_keys(self._keyspace, Call(self.program, (key,), (0,)), [0])


def _of_any_run(command: bytes, run: str) -> bytes:
    return command


def replay(server: Server, commands: Sequence[ReadyCommand]) -> list[Reply]:
    """Send commands in one round trip and return their replies, in order.

    Nothing else may decide on the same keys meanwhile. Raise Stale for a moment outside of the calendar window's
    params.
    """
    packed = [partial(_of_any_run, command) for command, _script in commands]
    packed_replies = server.wire.stream(packed, {script for _command, script in commands})
    unpack = _ANSWER.unpack_from
    replies = [unpack(raw) if len(raw) >= _ANSWER.size else _REFUSED.unpack_from(raw) for raw in packed_replies]
    for one in replies:
        if one[0] != 1:
            raise Stale(0, one[1])
    return replies


def forget(server: Server, keys: Iterable[str]) -> None:
    """Delete the states under these Redis keys, and their further keys."""
    endings = {"", *(ending for kind in ALGORITHMS.values() for ending in kind.storage.endings.values())}
    found = sorted({key + ending for key in keys for ending in endings})
    for start in range(0, len(found), 1000):
        server.wire.client.unlink(*found[start : start + 1000])
