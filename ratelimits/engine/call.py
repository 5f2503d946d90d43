"""Make calls of the deciding script (lua/decide.lua): their arguments, and the Redis command that sends them.

CONTRIBUTING.md explains the words of the project, such as program, shard, bin and run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ratelimits.algorithms.billing_periods import Span, periods_around
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine.keys import BIN_SECONDS, Keyspace, quoted, shard_of
from ratelimits.engine.program import Packed, Program
from ratelimits.engine.resp import bulks

#: The timeout of a call that accepts any wait.
ANY = float("inf")
#: The format of ARGV[3] up to the costs. lua/decide.lua lists the fields.
_REQUEST = struct.Struct("<BBBBBdddddd")
#: Length of a bin of usage (15 minutes), in µs.
_BIN = BIN_SECONDS * MICROSECONDS
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
#: The kinds of keys that belong to an account. They are in the account's shard.
_OWNED = ("user:", "api_key:", "account:")


class Op(IntEnum):
    """The operations of the script.

    TRY      decide a request, and charge it if it is admitted
    PEEK     decide a request without charging it
    REFUND   give back permits without a receipt
    RELEASE  end leases
    RESET    delete the states of the limits
    CREATE   make states that do not exist yet
    CHANGE   write existing states with the present parameters
    SETTLE   use a receipt: change its charge to the true costs, or refund it

    Only the simulator uses REFUND, CREATE and CHANGE.
    """

    TRY = 1
    PEEK = 2
    REFUND = 3
    RELEASE = 4
    RESET = 5
    CREATE = 6
    CHANGE = 7
    SETTLE = 8


class Meter(NamedTuple):
    """A meter that counts a request, such as "requests" or "tokens".

    `rule` is the id of the rule that bills the meter, and `version` is the rule's version. Both are 0 if no rule bills.
    """

    name: str
    rule: int = 0
    version: int = 0


class Usage(NamedTuple):
    """Where a request is counted.

    account   the account's identifier; "" if there is none
    key       the request's key, such as "user:42"
    meters    the meters that count the request. A call's costs begin with one cost for each meter, in this order
    periods   starts of the previous billing period, the current one and the next two, in µs since 1970 UTC
    timezone  the account's time zone. Periods outside of `periods` are calendar months in this time zone
    anchor    a local date and time (ISO) at which one of the account's months starts; None: on the first day
    kept      the period that kept its start and end after a change of time zone or anchor; None: no such period
    """

    account: str
    key: str
    meters: tuple[Meter, ...]
    periods: tuple[int, int, int, int]
    timezone: str = "UTC"
    anchor: str | None = None
    kept: Span | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The permits that an admitted request took. Any process can refund or settle a receipt, but only once.

    A receipt is plain data, so it can be pickled or stored.

    nonce    the name of the call that took the permits
    at       the moment of the decision, in µs since 1970 UTC
    bin      start of the bin (15 minutes) in which the request was counted, in seconds since 1970 UTC
    period   start of the billing period in which the request was counted, in seconds since 1970 UTC
    lease    the name of the request's leases; None: the nonce
    moments  the moment of the decision for each key, if a cluster decided shard by shard
    """

    nonce: str
    program: Program
    keys: tuple[str, ...]
    costs: tuple[int, ...]
    account: str
    usage: Usage | None
    at: int
    bin: int
    period: int
    lease: str | None = None
    moments: tuple[int, ...] = ()


class Call(NamedTuple):
    """One call of the script: a program (compiled limits), the limited keys and the costs of a request.

    keys         the limited keys, such as "user:42". If there is an `account`, its users, its API keys and the account
                 itself are in the account's shard. Each other key has a shard that depends on this key alone
    costs        one cost for each meter. Further costs of limits may follow. The `slot` of a term is a position in this
                 tuple. If a receipt is settled and less was used than charged, a cost is negative
    usage        where the request is counted; None: it is not counted
    timeout      the longest accepted wait, in seconds; ANY for any wait
    version      version of the caller's rules; None for limits that do not come from rules
    now          the moment of the decision, in µs since 1970 UTC, for tests and simulations; None: the server's time
    lease        name of the leases that a `concurrency` limit gives or ends; None: the call's nonce
    virtual      true if the clock is virtual, so that nothing expires
    receipt      the receipt that is settled or refunded
    whole        true if the whole receipt is refunded
    at_once      true if a request that would have to wait is refused
    receipt_ttl  seconds for which a receipt can be settled or refunded
    announces    true if the caller waits until a lease is released when a `concurrency` limit has refused
    """

    program: Program
    keys: tuple[str, ...]
    costs: tuple[int, ...]
    account: str = ""
    usage: Usage | None = None
    timeout: float = 0
    version: int | None = 0
    now: int | None = None
    op: Op = Op.TRY
    lease: str | None = None
    virtual: bool = False
    receipt: Receipt | None = None
    whole: bool = False
    at_once: bool = False
    receipt_ttl: float = 86_400
    announces: bool = False


#: A random name of this process, and a counter of its calls. A nonce consists of the name and a number.
_process_name = b""
_call_numbers = itertools.count()


def _reseed() -> None:
    global _process_name, _call_numbers
    _process_name, _call_numbers = secrets.token_hex(6).encode(), itertools.count()


_reseed()
os.register_at_fork(after_in_child=_reseed)


def nonce() -> bytes:
    """Return a nonce: a name for one call, in hexadecimal. No other call of any process has the same name."""
    return b"%b%x" % (_process_name, next(_call_numbers))


def shard(keyspace: Keyspace, key: str, account: str) -> int:
    """Return the shard of a key: the account's shard if the key belongs to an account."""
    return shard_of(f"account:{account}" if account and key.startswith(_OWNED) else key, keyspace.shards)


def shard_of_usage(keyspace: Keyspace, usage: Usage) -> int:
    """Return the shard that counts a request: the account's shard, or the key's shard if there is no account."""
    return shard_of(f"account:{usage.account}" if usage.account else usage.key, keyspace.shards)


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


class Clock:
    """This machine's clock, corrected by the times that the server reports. Times are in µs since 1970 UTC."""

    def __init__(self) -> None:
        #: The server's time minus this machine's time.
        self._difference = 0
        #: The moment at which a test has stopped the clock: the moment of all decisions. None: the clock runs.
        self.frozen: int | None = None

    def now(self) -> int:
        """Return an estimate of the server's time."""
        if self.frozen is not None:
            return self.frozen
        return time.time_ns() // 1000 + self._difference

    def correct(self, server_time: int) -> None:
        """Set the clock to a time that the server has just reported."""
        if self.frozen is None:
            self._difference = server_time - time.time_ns() // 1000

    def seconds(self) -> Callable[[], float]:
        """Return a function of the present moment in seconds: this machine's monotonic clock, or the stopped clock."""
        return time.monotonic if self.frozen is None else lambda: self.now() / MICROSECONDS

    def advance(self, microseconds: int) -> None:
        """Move the stopped clock forward."""
        assert self.frozen is not None
        self.frozen += microseconds

    def sleep(self, seconds: float) -> None:
        """Wait. If the clock is stopped, move it forward instead."""
        if self.frozen is None:
            time.sleep(seconds)
        else:
            self.advance(round(seconds * MICROSECONDS))

    async def asleep(self, seconds: float) -> None:
        """Do the same as `sleep`, in async code."""
        if self.frozen is None:
            await asyncio.sleep(seconds)
        else:
            self.advance(round(seconds * MICROSECONDS))


clock = Clock()


#: The cached bytes of a command. The items are: the run of the server for which the bytes were made; start and end of
#: the time for which they are valid (µs); and the bytes that follow the nonce.
_CachedBytes = tuple[str, float, float, bytes]
#: Cached bytes that are never valid.
_NEVER_VALID: _CachedBytes = ("", 0, 0, b"")


class Command:
    """A call as the bytes of a Redis command. It can be sent many times, each time with a new nonce."""

    __slots__ = ("_cached", "_front", "_head_count", "_uses_fast_path", "call", "keyspace", "parts", "script")

    def __init__(self, keyspace: Keyspace, call: Call) -> None:
        self.keyspace = keyspace
        self.call = call
        #: In a cluster, the commands that are sent instead of this one, one for each shard. cluster/split.py sets them.
        self.parts: Any = None
        program, usage = call.program, call.usage
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
        fields: list[bytes] = []
        if usage is not None and receipt is not None:
            fields = _counters(usage, receipt.bin, receipt.period)
        elif usage is not None:
            bin_start, period, until = bin_and_period(usage, now)
            start, end = max(start, bin_start * MICROSECONDS, period * MICROSECONDS), min(end, until)
            fields = _counters(usage, bin_start, period)
        flags = call.virtual * _VIRTUAL + (receipt is not None) * _ONCE + call.whole * _WHOLE + call.at_once * _AT_ONCE
        flags += (call.version is None) * _UNVERSIONED + call.announces * _ANNOUNCES
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
        before, after = around(packed, self._uses_fast_path, f"{call.version or 0} {run}", request, call.costs)
        if clock.frozen is not None:
            start = end = now  # The next call may have another moment.
        return run, start, end, b"%b%b%b" % (before, bulks(*fields), after)


@lru_cache(maxsize=1024)
def _around(
    packed: Packed, fast: bool, head: str, request: tuple[float, ...], costs: tuple[int, ...]
) -> tuple[bytes, bytes]:
    """Return two parts of a command: the bytes before the names of counters and leases, and the bytes after them.

    These bytes are the same for all calls of one kind, so they are cached.
    """
    first, *formats = packed.fast if fast else (b"",)
    request_bytes = _REQUEST.pack(*request) + struct.pack(f"<{len(costs)}d", *costs)
    return bulks(head.encode(), request_bytes, packed.program, first), bulks(*formats)


def bin_and_period(usage: Usage, now: int) -> tuple[int, int, int]:
    """Return the start of the bin, the start of the billing period, and the moment at which one of the two ends first.

    Bin and period are those that contain `now`. `now` and the last value are in µs, the starts are in seconds, all
    since 1970 UTC.
    """
    bin_start = now // _BIN * _BIN
    periods = usage.periods
    if not periods[0] <= now < periods[3]:
        periods = periods_around(usage.timezone, usage.anchor, usage.kept, now)
    number = 0 if now < periods[1] else 1 if now < periods[2] else 2
    end = min(bin_start + _BIN, periods[number + 1])
    return bin_start // MICROSECONDS, periods[number] // MICROSECONDS, end


def _counters(usage: Usage, bin_start: int, period: int) -> list[bytes]:
    """Return the names of the counters of an admitted request, one for each meter."""
    who = f"{quoted(usage.account)}|{quoted(usage.key)}"
    return [f"a|{bin_start}|{period}|{meter}|{who}".encode() for meter in _meter_texts(usage.meters)]


@lru_cache(maxsize=1024)
def _meter_texts(meters: tuple[Meter, ...]) -> list[str]:
    """Return for each meter the part "meter|rule|version" of a counter's name."""
    return [f"{quoted(meter.name)}|{meter.rule}|{meter.version}" for meter in meters]
