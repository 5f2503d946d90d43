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


class Command:
    """A call ready to be sent: all but the run of the server that it is sent to."""

    __slots__ = ("_after", "_before", "_version", "nonce", "script")

    def __init__(self, keyspace: Keyspace, call: Call, moment: int | None = None) -> None:
        """`moment` (µs) places the calendars; default: the call's `now`, else this machine's clock."""
        self.script = call.program.script
        self.nonce = call.lease if call.lease is not None else nonce()
        self._version = call.version
        shards = [shard(keyspace, key, call.account) for key in call.keys]
        heads = [] if call.virtual else self._heads(keyspace, call, shards)
        keys = self._keys(keyspace, call, shards, heads)
        usage, receipt = call.usage, call.receipt
        flags = call.virtual * _VIRTUAL + (receipt is not None) * _ONCE + call.whole * _WHOLE + call.at_once * _AT_ONCE
        request = _REQUEST.pack(
            call.op,
            flags,
            len(heads),
            len(usage.meters) if usage is not None else 0,
            -1.0 if call.now is None else call.now,
            -1.0 if call.timeout < 0 else round(call.timeout * MICROSECONDS),
            receipt.at if receipt is not None else 0,
            round(call.receipt_ttl * 1000),
            call.program.packed_states,
        )
        program, fast = call.program.packed(call.now if moment is None else moment)
        formats = call.program.formats or ()
        # Only the usual question has a short way.
        short = call.op is Op.TRY and not call.at_once and bool(formats)
        before = [
            request,
            program,
            struct.pack(f"<{len(call.costs)}d", *call.costs),
        ]
        after = [self.nonce.encode(), fast if short else b""]
        if usage is not None:
            after.append(_BOUNDS.pack(*usage.periods) if receipt is None else _PLACE.pack(receipt.bin, receipt.period))
            after.append(f"{quoted(usage.account)}|{quoted(usage.key)}".encode())
            for meter in usage.meters:
                after += [quoted(meter.name).encode(), b"%d|%d" % (meter.rule, meter.version)]
        if short:
            after += formats
        count = 3 + len(keys) + len(before) + 1 + len(after)
        lead = (b"EVALSHA", self.script.sha, b"%d" % len(keys), *(key.encode() for key in keys), *before)
        self._before = b"*%d\r\n" % count + wire.bulks(*lead)
        self._after = wire.bulks(*after)

    @staticmethod
    def _heads(keyspace: Keyspace, call: Call, shards: list[int]) -> list[int]:
        usage = call.usage
        if usage is None:
            return list(dict.fromkeys(shards))
        home = shard_of(f"account:{usage.account}" if usage.account else usage.key, keyspace.shards)
        return list(dict.fromkeys([home, *shards]))

    @staticmethod
    def _keys(keyspace: Keyspace, call: Call, shards: list[int], heads: list[int]) -> list[str]:
        states = [
            keyspace.state(shards[number], call.keys[number])
            if name is None
            else keyspace.own(shards[number], name, call.keys[number])
            for number, name in call.program.places
        ]
        beside = []
        if call.usage is not None:
            beside.append(keyspace.open(heads[0]))
        if call.receipt is not None:
            beside.append(keyspace.receipt(heads[0], call.receipt.nonce))
        packed = call.program.packed_states
        return [*(keyspace.head(number) for number in heads), *states[:packed], *beside, *states[packed:]]

    @staticmethod
    def states(keyspace: Keyspace, call: Call) -> list[str]:
        """Every key that a call's states may have, those that the script derives included."""
        shards = [shard(keyspace, key, call.account) for key in call.keys]
        keys = Command._keys(keyspace, Call(call.program, call.keys, call.costs, call.account), shards, [])
        return [*keys, *(key + ":n" for key in keys)]

    def to(self, run: str) -> bytes:
        """The command in RESP, for a connection to that run of the server."""
        return self._before + wire.bulks(f"{self._version} {run}".encode()) + self._after
