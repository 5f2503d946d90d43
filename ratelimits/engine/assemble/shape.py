"""The shape of a call: everything about a call that does not change from one request to the next.

A lasting limit is a limit whose count is restored from the ledger if Redis has lost its state. A form of a record says
which fields the record contains, and their types.
"""

from __future__ import annotations

from typing import NamedTuple

from ratelimits.algorithms.base import Algorithm

#: How many numbers stand before the costs in ARGV[3] of lua/decide.lua. Each number has 8 bytes.
REQUEST_NUMBERS = 7


class LimitShape(NamedTuple):
    """What a script knows about one limit. Positions begin at 1.

    algorithm  the class of the limit's algorithm
    form       the name of the usual form of the limit's record; "" if there is no usual form
    shadow     whether the mode of the limit is shadow
    slot       the position of the limit's cost among the costs of the call
    state_key  the position in KEYS of the Redis key with the limit's record
    own_key    the position in KEYS of the limit's first own key; 0 if the limit has no own key
    waits      whether the limit has a longest wait of its own. If not, the timeout of the call is used
    lasting    when the state is restored from the ledger. 0: never. 1: if Redis may have lost counts of this limit.
               2: in the same case as 1, and also if there is no state
    """

    algorithm: type[Algorithm]
    form: str
    shadow: bool
    slot: int
    state_key: int
    own_key: int
    waits: bool
    lasting: int = 0


class Shape(NamedTuple):
    """What a script knows about a call.

    op         the operation, such as "try" or "peek"
    limits     the shapes of the call's limits, in order
    heads      the number of heads that the script compares
    costs      the number of costs
    meters     the number of meters
    open_key   the position in KEYS, from 1, of the open batch. The Redis key of the receipt is at the next position. If
               there are no meters, there is no open batch, and `open_key` is the position of the receipt
    virtual    whether the clock is virtual (in the simulator), so that nothing expires
    at_once    whether a request that would have to wait is refused, whatever the timeouts are
    whole      whether a whole receipt is refunded
    lease      whether the call names its leases
    announces  whether the script writes to Redis that a refused caller now waits for a release
    counts_refusal  whether a refusal is counted as a denied request
    slots_move  whether the server is a cluster, whose slots may move to other nodes
    full       whether the script writes although the server's memory is full
    general    whether the script is a general one (general.py)
    """

    op: str
    limits: tuple[LimitShape, ...]
    heads: int
    costs: int
    meters: int
    open_key: int
    virtual: bool
    at_once: bool
    whole: bool
    lease: bool
    announces: bool
    counts_refusal: bool = True
    slots_move: bool = False
    full: bool = False
    general: bool = False


def flags(shape: Shape) -> dict[str, bool]:
    """Return the names that lua/decide.lua uses in conditions, and whether they hold for a shape."""
    op = shape.op
    return {
        "stored": bool(shape.limits or shape.heads or shape.general),
        "heads": shape.heads > 0,
        "full": shape.full and shape.heads > 0,
        "virtual": shape.virtual,
        "receipt": op == "settle",
        "decides": op in ("try", "peek"),
        "whole": shape.whole,
        "lasting": shape.general or any(limit.lasting for limit in shape.limits),
        "stores": op not in ("peek", "reset") or renews(shape),
        "counts": shape.meters > 0 and op in ("try", "settle"),
        **{
            name: op == name
            for name in ("try", "peek", "create", "change", "refund", "release", "settle", "reset", "restore")
        },
    }


def renews(shape: Shape) -> bool:
    """Return whether the call is a reset that writes new states.

    A lasting limit needs a new state: without a state, the next decision could restore the old count from the ledger.
    """
    return shape.op == "reset" and (shape.general or any(limit.lasting for limit in shape.limits))
