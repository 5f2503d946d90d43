"""The decision that the deciding script returns, and the errors for replies without a decision."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Mode
from ratelimits.engine.call import Call, Op, Receipt, bin_of
from ratelimits.engine.program import MAX_LIMITS, Program, program

#: The kinds of replies: the first number of a reply. lua/decide.lua describes them at "Returns".
DECIDED, RECEIPT_USED, OLD_RULES, NOT_VALID_NOW, LOST = 1, 2, 0, -2, -3
#: The reply to a decision begins with HEAD numbers for the whole request. Then come PER_LIMIT numbers for each limit.
HEAD, PER_LIMIT = 9, 3
#: Functions that unpack a reply, by the length of the reply in bytes. All numbers are integers of 64 bits. On a
#: cluster a decision also has one number for each key, so at most one more for each limit. Other replies have two
#: numbers.
_UNPACK = {
    8 * count: struct.Struct(f"<{count}q").unpack
    for count in (2, *range(HEAD, HEAD + (PER_LIMIT + 1) * MAX_LIMITS + 1))
}


class Stale(Exception):
    """Nothing was decided, because the caller's rules or their calendar windows are too old.

    A calendar window is a part of the calendar in which a limit counts, such as a month. `version` is the newer version
    of the rules; 0 if only the calendar windows are too old. In this case `now` is the server's time in µs since 1970
    UTC. If the rules are too old, `now` is 0.
    """

    def __init__(self, version: int, now: int = 0) -> None:
        super().__init__(
            f"the configuration in force is version {version}: load it and decide again"
            if version
            else "the calendar windows have ended: compile the limits for the present windows and decide again"
        )
        self.version = version
        self.now = now


class Lost(Exception):
    """Nothing was decided: perhaps Redis has lost the state of a limit that is restored from the ledger.

    Restore this state and decide again.
    """


class Full(Exception):
    """Nothing was decided: the server's memory is full. Make a new command, and decide again.

    The new command saves memory, and the server does not refuse it.
    """


class AlreadySettled(ValueError):
    """Nothing was done: the receipt was refunded or settled before, or is older than the setting RECEIPT_TTL allows."""


class Standing(NamedTuple):
    """The result of one limit in a decision.

    allowed      whether the limit admits the request
    remaining    how many permits could be taken from the limit now
    reset_after  seconds until all permits of the limit have come back
    """

    allowed: bool
    remaining: int
    reset_after: float


class Decision:
    """The decision on a request. Times are in seconds.

    allowed      whether the request is admitted. If the algorithm lets requests wait, the request proceeds after `wait`
    limit        the capacity of the binding limit (its rate for the algorithms smooth_*); None if no limit is enforced
    remaining    the permits left in the enforced limit that has the fewest; 0 if no limit is enforced
    retry_after  seconds until the same request would be admitted, if no other request comes; None if never, 0 if the
                 request is admitted
    reset_after  seconds until all permits of the limits have come back
    wait         seconds that the caller must wait before the request proceeds
    receipt      a record of the taken permits. With it the request can be refunded or settled. None if not admitted
    """

    __slots__ = ("_nonce", "call", "reply")

    def __init__(self, call: Call, reply: Sequence[int], nonce: bytes = b"") -> None:
        # The numbers of a reply, by index (times in µs):
        # 0  always 1: the call was decided
        # 1  allowed (1 or 0)
        # 2  position of the binding limit, from 1; 0 if there is no binding limit
        # 3  remaining permits
        # 4  retry_after; -1 for never
        # 5  reset_after
        # 6  wait
        # 7  the moment of the decision
        # 8  the moment at which the script counted the request
        # From 9 on: for each limit, whether it admits the request (1 or 0), its remaining permits and its reset_after.
        # If a cluster decided shard by shard, more numbers follow: for each key, the moment of the decision in its
        # shard.
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
        # The receipt names the bin in which the script counted the request. A request that is not
        # counted has neither.
        bin_start, _end = (0, 0) if call.counted is None else bin_of(self.counted_at)
        return Receipt(
            nonce=self._nonce.decode(),
            program=self._charged(),
            keys=call.keys,
            costs=call.costs,
            account=call.account,
            in_account=call.in_account,
            usage=call.usage,
            at=self.at,
            bin=bin_start,
            lease=call.lease,
            moments=tuple(reply[HEAD + PER_LIMIT * len(call.program.terms) :]),
        )

    def _charged(self) -> Program:
        """Return the limits that were charged: all, except shadow rules that would have refused the request."""
        terms = self.program.terms
        charged = tuple(term for number, term in enumerate(terms) if self.reply[HEAD + PER_LIMIT * number])
        return self.program if len(charged) == len(terms) else program(charged)

    @property
    def allowed(self) -> bool:
        return self.reply[1] == 1

    @property
    def binding(self) -> int | None:
        """Return the index of the binding limit; None if there is no such limit.

        The binding limit refuses for the longest time. If no limit refuses, it has the fewest permits left.
        """
        return self.reply[2] - 1 if self.reply[2] else None

    @property
    def limit(self) -> int | float | None:
        binding = self.binding
        return None if binding is None else self.program.terms[binding].algorithm.shown_limit

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
    def remaining_and_reset(self) -> tuple[int, float]:
        """Return `remaining`, and the seconds until all permits of the binding limit have come back.

        The seconds are 0 if there is no binding limit.
        """
        reply = self.reply
        number = reply[2]
        # `number` counts the limits from 1. The index 8 + 3 * number is HEAD + PER_LIMIT * (number - 1) + 2: the last
        # of the three numbers of the binding limit.
        return reply[3], reply[8 + 3 * number] / MICROSECONDS if number else 0.0

    @property
    def wait(self) -> float:
        return self.reply[6] / MICROSECONDS

    @property
    def at(self) -> int:
        """Return the moment of the decision by the server's clock: µs since 1970 UTC."""
        return self.reply[7]

    @property
    def counted_at(self) -> int:
        """Return the moment at which the script counted the request, by the same clock."""
        return self.reply[8]

    @property
    def standings(self) -> tuple[Standing, ...]:
        """Return the result of each limit, in the order of the limits."""
        numbers = self.reply[HEAD : HEAD + PER_LIMIT * len(self.program.terms)]
        return tuple(
            Standing(numbers[i] == 1, numbers[i + 1], numbers[i + 2] / MICROSECONDS)
            for i in range(0, len(numbers), PER_LIMIT)
        )


def refusal_by_zero_capacity(call: Call, now: int) -> Decision | None:
    """Return the refusal of a call that takes permits from an enforced limit with capacity 0.

    Return None if the call has no such limit. `now` is in µs since 1970 UTC.

    This function does not ask Redis. So the results of the other limits are not known: their standings say that they
    admit the request, with 0 permits remaining.
    """
    for position, term in enumerate(call.program.terms, 1):
        if term.mode is Mode.ENFORCE and call.costs[term.slot] > 0 and term.algorithm.admits_nothing:
            standings = (value for each in call.program.terms for value in (each is not term, 0, 0))
            decided, allowed, remaining, never, reset_after, wait = 1, 0, 0, -1, 0, 0
            reply = (decided, allowed, position, remaining, never, reset_after, wait, now, now, *standings)
            return Decision(call, reply)
    return None


def handed_over(call: Call, lease: bytes) -> Decision:
    """Return the decision for a caller that was refused, waited, and then got the lease with this name.

    The call must have only one limit, the limit of the lease, and the cost 1.
    """
    # lua/algorithms/concurrency.lua makes the name: "<moment>~<number>". The moment is in µs since 1970 UTC.
    at = int(lease.partition(b"~")[0])
    # All permits have come back when this lease ends. The first param of `concurrency` is lease_ttl, in µs.
    reset_after = int(call.program.terms[0].algorithm.params(at)[0])
    decided, allowed, binding, remaining, retry_after, wait = 1, 1, 1, 0, 0, 0
    standing = (allowed, remaining, reset_after)
    reply = (decided, allowed, binding, remaining, retry_after, reset_after, wait, at, at, *standing)
    return Decision(call, reply, nonce=lease)


def read(reply: bytes) -> tuple[int, ...]:
    """Return the integers of 64 bits in a reply of the script."""
    return _UNPACK[len(reply)](reply)
