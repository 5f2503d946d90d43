"""Make the Redis command that sends a call of the deciding script (lua/decide.lua)."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine.call import ANY, Call, Meter, Op, Usage, bin_and_period, shard, shard_of_usage
from ratelimits.engine.clock import clock
from ratelimits.engine.keys import Keyspace, quoted
from ratelimits.engine.resp import bulks

#: The format of ARGV[3] up to the costs. lua/decide.lua lists the fields.
_REQUEST = struct.Struct("<BBBBBdddddd")
# The flags in ARGV[3]:
#: The clock is virtual, so nothing expires.
_VIRTUAL = 1
#: The call refunds or settles a receipt. This can be done only once for each receipt.
_ONCE = 2
#: The call refunds the whole receipt.
_WHOLE = 4
#: A request that would have to wait is refused.
_AT_ONCE = 8
#: The limits have no version, so no edit can make them stale.
_UNVERSIONED = 16
#: If a `concurrency` limit refuses, the caller waits until a lease is released.
_ANNOUNCES = 32
#: The command has not been answered yet in this run of the server. Its lasting limits may have older states.
_FIRST = 64


def _shards_to_compare(keyspace: Keyspace, call: Call, shards: list[int]) -> list[int]:
    """Return the shards in which the call compares the rules' version. The first is the shard that counts usage."""
    if call.virtual:
        return []
    usage = call.usage
    if usage is None:
        return list(dict.fromkeys(shards))
    return list(dict.fromkeys([shard_of_usage(keyspace, usage), *shards]))


def state_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """Return the Redis keys of the limits' states: first the packed states, then the first own key of each limit.

    An own key belongs to one limit alone.
    """
    return [
        keyspace.state(shards[number], call.keys[number])
        if name is None
        else keyspace.own(shards[number], name, call.keys[number])
        for number, name, _endings in call.program.states
    ]


def further_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """Return the further own keys of limits that have several own keys. The script also makes these names itself."""
    own_keys = [state for state in call.program.states if state.own is not None]
    return [
        keyspace.own(shards[number], str(name), call.keys[number]) + ending
        for number, name, endings in own_keys
        for ending in endings
    ]


#: The cached bytes of a command. The items are: the run of the server for which the bytes were made; start and end of
#: the time for which they are valid (µs); and the bytes that follow the nonce.
_CachedBytes = tuple[str, float, float, bytes]
#: Cached bytes that are never valid.
_NEVER_VALID: _CachedBytes = ("", 0, 0, b"")


class Command:
    """A call as the bytes of a Redis command. It can be sent many times, each time with a new nonce."""

    __slots__ = (
        "_cached",
        "_front",
        "_head_count",
        "_uses_fast_path",
        "call",
        "is_first",
        "keyspace",
        "parts",
        "script",
    )

    def __init__(self, keyspace: Keyspace, call: Call) -> None:
        self.keyspace = keyspace
        self.call = call
        #: In a cluster, the commands that are sent instead of this one, one for each shard. cluster/split.py sets them.
        self.parts: Any = None
        program, usage = call.program, call.usage
        #: Whether a lasting limit of this command was not decided yet in this run of the server.
        self.is_first = program.lasts and call.op is Op.TRY
        self.script = program.script
        self._cached = _NEVER_VALID
        shards = [shard(keyspace, key, call.account) for key in call.keys]
        heads = _shards_to_compare(keyspace, call, shards)
        self._head_count = len(heads)
        states, packed = state_keys(keyspace, call, shards), program.packed_states
        keys = [*map(keyspace.head, heads), *states[:packed]]
        if usage is not None:
            keys.append(keyspace.open(heads[0]))
        if call.receipt is not None:
            keys.append(keyspace.receipt(heads[0], call.receipt.nonce))
        if len(states) > packed:
            # Name all keys. While a cluster moves a slot, a node runs a script only if this node has all named keys.
            keys += [*states[packed:], *further_keys(keyspace, call, shards)]
        meters = len(usage.meters) if usage is not None else 0
        leases = 1 if call.lease is not None else 0
        # fast.lua decides only requests that try to take permits and may wait.
        self._uses_fast_path = program.fast_parts > 0 and call.op is Op.TRY and not call.at_once
        fast = program.fast_parts - 1 if self._uses_fast_path else 0
        #: The bytes of the command before the nonce.
        self._front = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n%b" % (
            8 + len(keys) + meters + leases + fast,
            self.script.sha,
            bulks(b"%d" % len(keys), *[key.encode() for key in keys]),
        )

    def to(self, run: str, name: bytes) -> bytes:
        """Return the command in RESP, the protocol of Redis. `run` is the run of the server, `name` is the nonce."""
        now = self.call.now
        if now is None:
            now = clock.now()
        made_for, start, end, rest = self._cached
        if not start <= now < end or made_for != run:
            cached = self._cached = self._make(run, now)
            rest = cached[3]
        return b"%b$%d\r\n%b\r\n%b" % (self._front, len(name), name, rest)

    def _make(self, run: str, now: int) -> _CachedBytes:
        call = self.call
        usage, receipt = call.usage, call.receipt
        packed = call.program.packed(now)
        start, end = packed.start, packed.end
        if self._cached[0] != run:
            self.is_first = call.program.lasts and call.op is Op.TRY
        is_first = self.is_first
        fields: list[bytes] = []
        if usage is not None and receipt is not None:
            fields = _counters(usage, receipt.bin, receipt.period)
        elif usage is not None:
            bin_start, period, until = bin_and_period(usage, now)
            start, end = max(start, bin_start * MICROSECONDS, period * MICROSECONDS), min(end, until)
            fields = _counters(usage, bin_start, period)
        flags = call.virtual * _VIRTUAL + (receipt is not None) * _ONCE + call.whole * _WHOLE + call.at_once * _AT_ONCE
        flags += (call.version is None) * _UNVERSIONED + call.announces * _ANNOUNCES + is_first * _FIRST
        moment = clock.frozen if call.now is None else call.now
        request = (
            *(call.op, flags, self._head_count, len(fields), call.program.packed_states),
            -1.0 if moment is None else moment,
            -1.0 if call.timeout == ANY else round(max(call.timeout, 0) * MICROSECONDS),
            receipt.at if receipt is not None else 0,
            round(call.receipt_ttl * 1000),
            *(start, end),
        )
        if call.lease is not None:
            fields.append(call.lease.encode())
        # Do not cache the bytes of a call that has a moment or a receipt: no other call has the same bytes.
        around = _around if moment is None and receipt is None else _around.__wrapped__
        fast = packed.fast if self._uses_fast_path else (b"",)
        if is_first:
            fast = b"", *fast[1:]  # fast.lua does not look at the age of a state.
        before, after = around(packed.program, fast, f"{call.version or 0} {run}", request, call.costs)
        if clock.frozen is not None or is_first:
            start = end = now  # The next call may have another moment, or is not the first one.
        return run, start, end, b"%b%b%b" % (before, bulks(*fields), after)


@lru_cache(maxsize=1024)
def _around(
    program: bytes, fast: tuple[bytes, ...], head: str, request: tuple[float, ...], costs: tuple[int, ...]
) -> tuple[bytes, bytes]:
    """Return two parts of a command: the bytes before the names of counters and leases, and the bytes after them.

    These bytes are the same for all calls of one kind, so they are cached.
    """
    first, *formats = fast
    request_bytes = _REQUEST.pack(*request) + struct.pack(f"<{len(costs)}d", *costs)
    return bulks(head.encode(), request_bytes, program, first), bulks(*formats)


def _counters(usage: Usage, bin_start: int, period: int) -> list[bytes]:
    """Return the names of the counters of an admitted request, one for each meter."""
    who = f"{quoted(usage.account)}|{quoted(usage.key)}"
    return [f"a|{bin_start}|{period}|{meter}|{who}".encode() for meter in _meter_texts(usage.meters)]


@lru_cache(maxsize=1024)
def _meter_texts(meters: tuple[Meter, ...]) -> list[str]:
    """Return for each meter the part "meter|rule|version" of a counter's name."""
    return [f"{quoted(meter.name)}|{meter.rule}|{meter.version}" for meter in meters]
