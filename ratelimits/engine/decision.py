"""The decision in a reply of the script, and the errors that mean there is none."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ratelimits.algorithms.limits import Mode
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine.call import Call, Op, Receipt, bin_and_period
from ratelimits.engine.program import MAX_LIMITS, Program, program

#: Functions that unpack replies, by length: 9 integers of 64 bits, 3 for each limit, and on a cluster 1 for each key.
_UNPACK = {8 * count: struct.Struct(f"<{count}q").unpack for count in (2, *range(9, 10 + 4 * MAX_LIMITS))}


class Stale(Exception):
    """The caller's rules, or their calendar windows, are older than those in force: nothing was decided.

    `version` is the newer configuration; 0 if only the calendar windows are old. `now` is the server's time in µs since
    1970 UTC.
    """

    def __init__(self, version: int, now: int = 0) -> None:
        super().__init__(f"the configuration in force is version {version}: load it and decide again")
        self.version = version
        self.now = now


class AlreadySettled(ValueError):
    """The receipt was refunded or settled before, or is older than RECEIPT_TTL: nothing was done."""


class Standing(NamedTuple):
    """One limit's part in a decision: whether it admits, the permits left, the seconds until it is as if never used."""

    allowed: bool
    remaining: int
    reset_after: float


class Decision:
    """The decision on a request. Times are in seconds.

    allowed      admitted now; or, if the algorithm lets requests wait, admitted after `wait`
    limit        the capacity of the limit that binds (its rate for smooth_*); None if no limit is enforced
    remaining    permits that could be taken now
    retry_after  seconds until the same request would be admitted if nothing else happens; None if it never can be
    reset_after  seconds until the state is as if never used
    wait         seconds that the caller must wait before it proceeds
    receipt      what an admitted request took, to refund, settle or release; None if it took nothing
    """

    __slots__ = ("_nonce", "call", "reply")

    def __init__(self, call: Call, reply: Sequence[int], nonce: bytes = b"") -> None:
        self.call = call
        self.reply = reply
        self._nonce = nonce

    def __repr__(self) -> str:
        shown = ("allowed", "limit", "remaining", "retry_after", "reset_after", "wait")
        return f"Decision({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def program(self) -> Program:
        """Return the limits that were decided, in the order of `standings`."""
        return self.call.program

    @property
    def receipt(self) -> Receipt | None:
        call, reply = self.call, self.reply
        if reply[1] != 1 or call.op is not Op.TRY:
            return None
        # By the clock of the call that counted it, so that they are those of its counters.
        counted = bin_and_period(call.usage, reply[8]) if call.usage is not None else (0, 0)
        return Receipt(
            self._nonce.decode(),
            self._charged(),
            call.keys,
            call.costs,
            call.account,
            call.usage,
            reply[7],
            *counted[:2],
            call.lease,
            # If a cluster decided shard by shard: the moment of each key.
            tuple(reply[9 + 3 * len(call.program.terms) :]),
        )

    def _charged(self) -> Program:
        """Return the limits that were charged. A shadow rule that would have refused was not."""
        terms = self.program.terms
        charged = tuple(term for number, term in enumerate(terms) if self.reply[9 + 3 * number])
        return self.program if len(charged) == len(terms) else program(charged)

    @property
    def allowed(self) -> bool:
        return self.reply[1] == 1

    @property
    def binding(self) -> int | None:
        """Return the index of the limit that binds: the one that refuses longest, or else has the least left."""
        return self.reply[2] - 1 if self.reply[2] else None

    @property
    def limit(self) -> int | float | None:
        binding = self.binding
        return None if binding is None else self.program.terms[binding].algorithm.shown

    @property
    def remaining(self) -> int:
        return self.reply[3]

    @property
    def retry_after(self) -> float | None:
        return None if self.reply[4] < 0 else self.reply[4] / MICROSECONDS

    @property
    def reset_after(self) -> float:
        return self.reply[5] / MICROSECONDS

    @property
    def wait(self) -> float:
        return self.reply[6] / MICROSECONDS

    @property
    def at(self) -> int:
        """Return the moment of the decision by the server's clock: µs since 1970 UTC."""
        return self.reply[7]

    @property
    def standings(self) -> tuple[Standing, ...]:
        """Return what each limit decided, in the order of the limits."""
        rest = self.reply[9 : 9 + 3 * len(self.program.terms)]
        return tuple(Standing(rest[i] == 1, rest[i + 1], rest[i + 2] / MICROSECONDS) for i in range(0, len(rest), 3))


def blocked(call: Call, now: int) -> Decision | None:
    """Return the refusal of a call with a limit of capacity 0, which needs no server; None if it has no such limit.

    The standings of the other limits are unknown, and say that nothing is left. `now` is in µs since 1970 UTC.
    """
    for number, term in enumerate(call.program.terms, 1):
        if term.mode is Mode.ENFORCE and call.costs[term.slot] > 0 and term.algorithm.closed:
            standings = (part for each in call.program.terms for part in (each is not term, 0, 0))
            return Decision(call, (1, 0, number, 0, -1, 0, 0, now, now, *standings))
    return None


def read(reply: bytes) -> tuple[int, ...]:
    """Return the integers of 64 bits in a reply of the script."""
    return _UNPACK[len(reply)](reply)
