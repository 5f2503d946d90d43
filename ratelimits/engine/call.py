"""A call of the deciding script: its arguments, and the command that sends them."""

from __future__ import annotations

import itertools
import os
import secrets
import struct
import time
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
_REQUEST = struct.Struct("<BBBBBdddddd")
_BIN = BIN_SECONDS * MICROSECONDS
#: Flags that decide.lua reads: a virtual clock; once for each receipt; the whole receipt; refuse instead of making the
#: request wait; limits without a version.
_VIRTUAL, _ONCE, _WHOLE, _AT_ONCE, _FREE = 1, 2, 4, 8, 16
_OWNED = ("user:", "api_key:", "account:")


class Op(IntEnum):
    """What the script does with the limits of a call."""

    TRY = 1
    PEEK = 2
    REFUND = 3
    RELEASE = 4
    RESET = 5
    CREATE = 6
    CHANGE = 7
    SETTLE = 8


class Meter(NamedTuple):
    """A meter that counts a request: its name, and the rule and version that bill it (0 if none)."""

    name: str
    rule: int = 0
    version: int = 0


class Usage(NamedTuple):
    """Where a request is counted.

    account   the account's identifier; "" if there is none
    key       the key that it is counted under, such as "user:42"
    meters    the meters that count it. A call's costs begin with one cost for each of them, in this order
    periods   starts of the previous billing period, the current one and the next two, in µs since 1970 UTC
    timezone  the account's time zone. Later periods are its calendar months
    anchor    an ISO local date-time from which these months start, or None
    kept      the billing period whose start and end stayed when the account's terms changed, or None
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
    """What an admitted request took. Any process can refund or settle it, but only once.

    It is plain data, so it can be pickled or stored. `at` is in µs since 1970 UTC, `bin` and `period` are in seconds.
    If a cluster decided shard by shard, `moments` has the `at` of each key.
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
    """One call of the script: a program, the keys that it counts and the costs of a request.

    keys         the program's keys, such as "user:42". Those of users, API keys and the account itself live in the
                 shard of `account`, if there is one; all others in their own shards
    costs        a term's `slot` is a position in them. They are negative where a receipt is settled for less
    usage        where the request is counted; None: it is not counted
    timeout      the longest wait that is accepted, in seconds; ANY for any wait
    version      of the caller's rules; None for limits that belong to no configuration
    now          in µs since 1970 UTC, instead of the server's clock: for tests and simulations
    lease        the name of the leases that `concurrency` gives or takes back; None: the call's nonce
    virtual      the clock is virtual: nothing expires
    receipt      the receipt to settle or, with `whole`, to refund
    at_once      refuse a request that would have to wait
    receipt_ttl  in seconds
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


_prefix = b""
_numbers = itertools.count()


def _reseed() -> None:
    global _prefix, _numbers
    _prefix, _numbers = secrets.token_hex(6).encode(), itertools.count()


_reseed()
os.register_at_fork(after_in_child=_reseed)


def nonce() -> bytes:
    """Return a name, in hexadecimal, that no other call of any process has."""
    return b"%b%x" % (_prefix, next(_numbers))


def shard(keyspace: Keyspace, key: str, account: str) -> int:
    """Return the shard of a key: the account's shard if the key belongs to an account."""
    return shard_of(f"account:{account}" if account and key.startswith(_OWNED) else key, keyspace.shards)


def home(keyspace: Keyspace, usage: Usage) -> int:
    """Return the shard that counts a usage: the account's, or the key's if there is no account."""
    return shard_of(f"account:{usage.account}" if usage.account else usage.key, keyspace.shards)


def _heads(keyspace: Keyspace, call: Call, shards: list[int]) -> list[int]:
    """Return the shards whose versions are checked; first the shard that counts the request."""
    if call.virtual:
        return []
    usage = call.usage
    if usage is None:
        return list(dict.fromkeys(shards))
    return list(dict.fromkeys([home(keyspace, usage), *shards]))


def state_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """Return the Redis keys of a call's states, the packed states first."""
    return [
        keyspace.state(shards[number], call.keys[number])
        if name is None
        else keyspace.own(shards[number], name, call.keys[number])
        for number, name, _endings in call.program.states
    ]


def further_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """Return the further Redis keys of states that have keys of their own. The script builds these names itself."""
    own = [state for state in call.program.states if state.own is not None]
    return [
        keyspace.own(shards[number], str(name), call.keys[number]) + ending
        for number, name, endings in own
        for ending in endings
    ]


class Clock:
    """This machine's clock, corrected by the times that the server reports: µs since 1970 UTC."""

    def __init__(self) -> None:
        self._ahead = 0

    def now(self) -> int:
        """Return the server's time as far as it is known."""
        return time.time_ns() // 1000 + self._ahead

    def correct(self, server_time: int) -> None:
        """Correct the clock by a time that the server has just reported."""
        self._ahead = server_time - time.time_ns() // 1000


clock = Clock()


#: What a command keeps from one call to the next: the run of the server that it is for, from when until when it is
#: valid (µs), and its bytes after the nonce.
_Made = tuple[str, float, float, bytes]
_NEVER: _Made = ("", 0, 0, b"")


class Command:
    """A call as bytes, which can be sent any number of times. Each time only the nonce is new."""

    __slots__ = ("_fast", "_front", "_heads", "_made", "call", "keyspace", "parts", "script")

    def __init__(self, keyspace: Keyspace, call: Call) -> None:
        self.keyspace = keyspace
        self.call = call
        #: What is sent instead to the nodes of a cluster. engine.cluster.split fills it in.
        self.parts: Any = None
        program, usage = call.program, call.usage
        self.script = program.script
        self._made = _NEVER
        shards = [shard(keyspace, key, call.account) for key in call.keys]
        heads = _heads(keyspace, call, shards)
        self._heads = len(heads)
        own, packed = state_keys(keyspace, call, shards), program.packed_states
        keys = [*map(keyspace.head, heads), *own[:packed]]
        if usage is not None:
            keys.append(keyspace.open(heads[0]))
        if call.receipt is not None:
            keys.append(keyspace.receipt(heads[0], call.receipt.nonce))
        if len(own) > packed:
            # While a slot of a cluster moves, a node runs a script only if it has all keys that the command names.
            keys += [*own[packed:], *further_keys(keyspace, call, shards)]
        meters = len(usage.meters) if usage is not None else 0
        leases = 1 if call.lease is not None else 0
        # The fast path knows only requests that try to take permits, and do not refuse to wait.
        self._fast = program.fast_parts > 0 and call.op is Op.TRY and not call.at_once
        fast = program.fast_parts - 1 if self._fast else 0
        self._front = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n%b" % (
            8 + len(keys) + meters + leases + fast,
            self.script.sha,
            bulks(b"%d" % len(keys), *[key.encode() for key in keys]),
        )

    def to(self, run: str, name: bytes) -> bytes:
        """Return the command in RESP, for a connection to this run of the server. `name` is the nonce."""
        now = self.call.now
        if now is None:
            now = clock.now()
        made_for, start, end, rest = self._made
        if not start <= now < end or made_for != run:
            made = self._made = self._make(run, now)
            rest = made[3]
        return b"%b$%d\r\n%b\r\n%b" % (self._front, len(name), name, rest)

    def _make(self, run: str, now: int) -> _Made:
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
        flags += (call.version is None) * _FREE
        request = (
            *(call.op, flags, self._heads, len(fields), call.program.packed_states),
            -1.0 if call.now is None else call.now,
            -1.0 if call.timeout == ANY else round(max(call.timeout, 0) * MICROSECONDS),
            receipt.at if receipt is not None else 0,
            round(call.receipt_ttl * 1000),
            *(start, end),
        )
        if call.lease is not None:
            fields.append(call.lease.encode())
        # Calls with a `now` of their own, and receipts, are not repeated: do not cache their bytes.
        around = _around if call.now is None and receipt is None else _around.__wrapped__
        before, after = around(packed, self._fast, f"{call.version or 0} {run}", request, call.costs)
        return run, start, end, b"%b%b%b" % (before, bulks(*fields), after)


@lru_cache(maxsize=1024)
def _around(
    packed: Packed, fast: bool, head: str, request: tuple[float, ...], costs: tuple[int, ...]
) -> tuple[bytes, bytes]:
    """Return the bytes before and after a call's own fields: the same for all calls that are alike."""
    first, *formats = packed.fast if fast else (b"",)
    request_bytes = _REQUEST.pack(*request) + struct.pack(f"<{len(costs)}d", *costs)
    return bulks(head.encode(), request_bytes, packed.program, first), bulks(*formats)


def bin_and_period(usage: Usage, now: int) -> tuple[int, int, int]:
    """Return the starts of the bin and of the billing period that contain `now`, and until when both are current.

    `now` and the last value are in µs, the starts in seconds, all since 1970 UTC.
    """
    bin_start = now // _BIN * _BIN
    periods = usage.periods
    if not periods[0] <= now < periods[3]:
        periods = periods_around(usage.timezone, usage.anchor, usage.kept, now)
    number = 0 if now < periods[1] else 1 if now < periods[2] else 2
    end = min(bin_start + _BIN, periods[number + 1])
    return bin_start // MICROSECONDS, periods[number] // MICROSECONDS, end


def _counters(usage: Usage, bin_start: int, period: int) -> list[bytes]:
    who = f"{quoted(usage.account)}|{quoted(usage.key)}"
    return [f"a|{bin_start}|{period}|{meter}|{who}".encode() for meter in _metered(usage.meters)]


@lru_cache(maxsize=1024)
def _metered(meters: tuple[Meter, ...]) -> list[str]:
    return [f"{quoted(meter.name)}|{meter.rule}|{meter.version}" for meter in meters]
