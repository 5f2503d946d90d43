"""A call of the deciding script: what it asks, and the command that asks it."""

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

#: As a timeout: wait as long as it takes.
ANY = float("inf")
_REQUEST = struct.Struct("<BBBBBdddddd")
_BIN = BIN_SECONDS * MICROSECONDS
_VIRTUAL, _ONCE, _WHOLE, _AT_ONCE, _FREE = 1, 2, 4, 8, 16
_OWNED = ("user:", "api_key:", "account:")


class Op(IntEnum):
    """What the script is asked to do."""

    TRY = 1
    PEEK = 2
    REFUND = 3
    RELEASE = 4
    RESET = 5
    CREATE = 6
    CHANGE = 7
    SETTLE = 8


class Meter(NamedTuple):
    """What a request is counted as: a meter's name, and the rule and its version that bill it (0 if none)."""

    name: str
    rule: int = 0
    version: int = 0


class Usage(NamedTuple):
    """Where a request is counted: its account ("" if none), its key, its meters and the billing periods around now.

    The first costs of the call are those of `meters`, in their order; `periods` are the starts of the previous, the
    current, the next and the next but one billing period, in µs since 1970 UTC: calendar months of `timezone`, from
    `anchor` (ISO local date-time) if there is one, after the period `kept`.
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
    """What an admitted request took, to be given back or settled at most once, by any process.

    `at` is µs since 1970 UTC, `bin` and `period` are seconds; plain data, so that it can be pickled or kept. Where a
    cluster decided shard by shard, `moments` are the `at` of each key.
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
    """A question to the script: which program, for which keys, at which costs.

    `keys` are the program's, such as "user:42"; a user's, an API key's and the account's own live in the shard of
    `account`, if there is one, all others in their own. `costs` are by slot, negative where a receipt is settled for
    less. `timeout` in seconds is the longest wait accepted; ANY: any. `version` is that of the caller's rules, None for
    limits of no configuration. `now` in µs stands in for the server's clock, and with `virtual` nothing expires, in
    tests and simulations. `at_once` refuses whatever would have to wait. `lease` names what `concurrency` hands out or
    takes back (None: the call's nonce). `receipt_ttl` is in seconds.
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
    """A name that no other call of any process has, in hexadecimal."""
    return b"%b%x" % (_prefix, next(_numbers))


def shard(keyspace: Keyspace, key: str, account: str) -> int:
    """The shard of a key: its account's, if it belongs to one."""
    return shard_of(f"account:{account}" if account and key.startswith(_OWNED) else key, keyspace.shards)


def home(keyspace: Keyspace, usage: Usage) -> int:
    """The shard that counts a usage: its account's, else its key's."""
    return shard_of(f"account:{usage.account}" if usage.account else usage.key, keyspace.shards)


def _heads(keyspace: Keyspace, call: Call, shards: list[int]) -> list[int]:
    """The shards whose versions are checked, the one that counts the request first."""
    if call.virtual:
        return []
    usage = call.usage
    if usage is None:
        return list(dict.fromkeys(shards))
    return list(dict.fromkeys([home(keyspace, usage), *shards]))


def state_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """The keys of a call's states, packed ones first."""
    return [
        keyspace.state(shards[number], call.keys[number])
        if name is None
        else keyspace.own(shards[number], name, call.keys[number])
        for number, name, _endings in call.program.states
    ]


def beside(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """What the script finds without being told of it, beside its own states."""
    own = [place for place in call.program.states if place[1] is not None]
    return [
        keyspace.own(shards[number], str(name), call.keys[number]) + ending
        for number, name, endings in own
        for ending in endings
    ]


class Clock:
    """This machine's clock, put right by what the server says: µs since 1970 UTC."""

    def __init__(self) -> None:
        self._ahead = 0

    def now(self) -> int:
        """The server's time, as far as is known."""
        return time.time_ns() // 1000 + self._ahead

    def put_right(self, servers: int) -> None:
        """Learn the server's time."""
        self._ahead = servers - time.time_ns() // 1000


clock = Clock()


#: What follows a command's nonce: for which run of the server it was made, from when and until when it is right (µs).
_Made = tuple[str, float, float, bytes]
_NEVER: _Made = ("", 0, 0, b"")


class Command:
    """A call ready to be sent, as often as need be: all but its nonce and the run of the server that it is sent to."""

    __slots__ = ("_fast", "_front", "_heads", "_made", "call", "keyspace", "parts", "script")

    def __init__(self, keyspace: Keyspace, call: Call) -> None:
        self.keyspace = keyspace
        self.call = call
        #: What a cluster is asked in its place, once that is known: engine.cluster.split fills it in.
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
            # Where a slot is on the move, a script begins only if all the keys that it is told of are there.
            keys += [*own[packed:], *beside(keyspace, call, shards)]
        meters = len(usage.meters) if usage is not None else 0
        leases = 1 if call.lease is not None else 0
        # Only the usual question has a short way.
        self._fast = program.fast_parts > 0 and call.op is Op.TRY and not call.at_once
        fast = program.fast_parts - 1 if self._fast else 0
        self._front = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n%b" % (
            8 + len(keys) + meters + leases + fast,
            self.script.sha,
            bulks(b"%d" % len(keys), *[key.encode() for key in keys]),
        )

    def to(self, run: str, name: bytes) -> bytes:
        """The command in RESP, for a connection to that run of the server; `name` is the nonce of this time."""
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
        # Questions at moments of their own, and receipts, are not asked again.
        around = _around if call.now is None and receipt is None else _around.__wrapped__
        before, behind = around(packed, self._fast, f"{call.version or 0} {run}", request, call.costs)
        return run, start, end, b"%b%b%b" % (before, bulks(*fields), behind)


@lru_cache(maxsize=1024)
def _around(
    packed: Packed, fast: bool, head: str, request: tuple[float, ...], costs: tuple[int, ...]
) -> tuple[bytes, bytes]:
    """What lies before and behind a call's own fields: the same for all who ask alike."""
    first, *formats = packed.fast if fast else (b"",)
    request_bytes = _REQUEST.pack(*request) + struct.pack(f"<{len(costs)}d", *costs)
    return bulks(head.encode(), request_bytes, packed.program, first), bulks(*formats)


def bin_and_period(usage: Usage, now: int) -> tuple[int, int, int]:
    """Starts of the bin and the billing period that `now` (µs) lies in, in seconds, and when the first ends (µs)."""
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
