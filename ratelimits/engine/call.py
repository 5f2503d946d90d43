"""A call of the deciding script: what it asks, and the command that asks it."""

from __future__ import annotations

import itertools
import os
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ratelimits.engine import wire
from ratelimits.engine.keys import Keyspace, quoted, shard_of
from ratelimits.engine.limits import MICROSECONDS
from ratelimits.engine.program import Program

#: As a timeout: wait as long as it takes.
ANY = -1.0
_REQUEST = struct.Struct("<BBBBddddB")
_BOUNDS = struct.Struct("<dddd")
_PLACE = struct.Struct("<dd")
_VIRTUAL, _ONCE, _WHOLE, _AT_ONCE = 1, 2, 4, 8
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Where a request is counted: its account ("" if none), its key, its meters and the billing periods around now.

    The first costs of the call are those of `meters`, in their order; `periods` are the starts of the previous, the
    current, the next and the next but one billing period, in µs since 1970 UTC: calendar months of `timezone`, from
    `anchor` (ISO local date-time) if there is one.
    """

    account: str
    key: str
    meters: tuple[Meter, ...]
    periods: tuple[int, int, int, int]
    timezone: str = "UTC"
    anchor: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an admitted request took, to be given back or settled at most once, by any process.

    `at` is µs since 1970 UTC, `bin` and `period` are seconds; plain data, so that it can be pickled or kept.
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


@dataclass(frozen=True, slots=True)
class Call:
    """A question to the script: which program, for which keys, at which costs.

    `keys` are the program's, such as "user:42"; a user's, an API key's and the account's own live in the shard of
    `account`, if there is one, all others in their own. `costs` are by slot, negative where a receipt is settled for
    less. `timeout` in seconds is the longest wait accepted; ANY: any. `version` is that of the caller's rules. `now` in
    µs stands in for the server's clock, and with `virtual` nothing expires, in tests and simulations. `at_once` refuses
    whatever would have to wait. `receipt_ttl` is in seconds.
    """

    program: Program
    keys: tuple[str, ...]
    costs: tuple[int, ...]
    account: str = ""
    usage: Usage | None = None
    timeout: float = 0
    version: int = 0
    now: int | None = None
    op: Op = Op.TRY
    lease: str | None = None
    virtual: bool = False
    receipt: Receipt | None = None
    whole: bool = False
    at_once: bool = False
    receipt_ttl: float = 86_400


_prefix = ""
_numbers = itertools.count()


def _reseed() -> None:
    global _prefix, _numbers
    _prefix, _numbers = secrets.token_hex(6), itertools.count()


_reseed()
os.register_at_fork(after_in_child=_reseed)


def nonce() -> str:
    """Text that no other call of any process has."""
    return f"{_prefix}{next(_numbers):x}"


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


def states(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """The keys of a call's states, packed ones first."""
    return [
        keyspace.state(shards[number], call.keys[number])
        if name is None
        else keyspace.own(shards[number], name, call.keys[number])
        for number, name in call.program.places
    ]


class Command:
    """A call ready to be sent, as often as need be: all but its nonce and the run of the server that it is sent to."""

    __slots__ = ("_front", "_heads", "_moment", "_packed", "_rest", "_run", "call", "script")

    def __init__(self, keyspace: Keyspace, call: Call, moment: int | None = None) -> None:
        """`moment` (µs) places the calendars; default: the call's `now`, else this machine's clock."""
        self.call = call
        self.script = call.program.script
        self._moment = call.now if moment is None else moment
        self._packed: tuple[bytes, bytes] | None = None
        self._rest, self._run = b"", ""
        shards = [shard(keyspace, key, call.account) for key in call.keys]
        heads = _heads(keyspace, call, shards)
        self._heads = len(heads)
        keys, usage = states(keyspace, call, shards), call.usage
        beside = [keyspace.open(heads[0])] if usage is not None else []
        if call.receipt is not None:
            beside.append(keyspace.receipt(heads[0], call.receipt.nonce))
        packed = call.program.packed_states
        keys = [*(keyspace.head(number) for number in heads), *keys[:packed], *beside, *keys[packed:]]
        who = f"{quoted(usage.account)}|{quoted(usage.key)}" if usage is not None else ""
        count = 5 + len(keys) + len(self._arguments("", (b"", b"")))
        self._front = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$%d\r\n%d\r\n%b" % (
            count,
            self.script.sha,
            len(str(len(keys))),
            len(keys),
            wire.bulks(*(key.encode() for key in keys), who.encode()),
        )

    def to(self, run: str, name: bytes) -> bytes:
        """The command in RESP, for a connection to that run of the server; `name` is the nonce of this time."""
        packed = self.call.program.packed(self._moment)
        if packed is not self._packed or run != self._run:
            self._rest = wire.bulks(*self._arguments(run, packed))
            self._packed, self._run = packed, run
        return b"%b$%d\r\n%b\r\n%b" % (self._front, len(name), name, self._rest)

    def _arguments(self, run: str, packed: tuple[bytes, bytes]) -> list[bytes]:
        """What follows who and nonce in ARGV."""
        call, (program, fast) = self.call, packed
        usage, receipt, formats = call.usage, call.receipt, call.program.formats or ()
        flags = call.virtual * _VIRTUAL + (receipt is not None) * _ONCE + call.whole * _WHOLE + call.at_once * _AT_ONCE
        request = _REQUEST.pack(
            call.op,
            flags,
            self._heads,
            len(usage.meters) if usage is not None else 0,
            -1.0 if call.now is None else call.now,
            -1.0 if call.timeout < 0 else round(call.timeout * MICROSECONDS),
            receipt.at if receipt is not None else 0,
            round(call.receipt_ttl * 1000),
            call.program.packed_states,
        )
        # Only the usual question has a short way.
        short = call.op is Op.TRY and not call.at_once and bool(formats)
        costs = struct.pack(f"<{len(call.costs)}d", *call.costs)
        head = f"{call.version} {run}".encode()
        arguments = [request, program, costs, head, fast if short else b""]
        if usage is not None:
            place = _BOUNDS.pack(*usage.periods) if receipt is None else _PLACE.pack(receipt.bin, receipt.period)
            arguments.append(place)
            for meter in usage.meters:
                arguments += [quoted(meter.name).encode(), b"%d|%d" % (meter.rule, meter.version)]
        return [*arguments, *formats] if short else arguments
