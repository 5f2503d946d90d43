"""Make the Redis commands of a call: to decide it (lua/decide.lua), and to ask whether Redis has states of a key."""

from __future__ import annotations

import struct
from functools import lru_cache
from time import time_ns
from typing import Any

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.engine import memory
from ratelimits.engine.assemble import Assembled, Shape, assembled
from ratelimits.engine.assemble.scripts import Script, bulks, resp
from ratelimits.engine.call import ANY, Call, Op, bin_of, counters_of, shard, shard_of_usage
from ratelimits.engine.clock import clock
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.memory import Shortage


def _shards_to_compare(keyspace: Keyspace, call: Call, shards: list[int]) -> list[int]:
    """Return the shards whose heads the call compares. If the request is counted, the first shard counts it.

    A head is a string in Redis with the version of the rules. With a virtual clock a call compares no heads.
    """
    if call.virtual:
        return []
    usage = call.usage
    # A request of nobody's limits compares a head too: otherwise its process would not notice the first rule.
    if usage is not None and (usage.counted or not shards):
        shards = [shard_of_usage(keyspace, usage), *shards]
    return list(dict.fromkeys(shards))


def state_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """Return the Redis keys of the limits' states: first the packed states, then the first own key of each limit.

    An own key is a Redis key that belongs to one limit alone. Only the limits of some algorithms have own keys.
    """
    return [
        keyspace.state(shards[key], call.keys[key]) if own is None else keyspace.own(shards[key], own, call.keys[key])
        for key, own, _endings in call.program.states
    ]


def further_keys(keyspace: Keyspace, call: Call, shards: list[int]) -> list[str]:
    """Return the further own keys of limits that have several own keys.

    The script makes these names itself, but a command must name all its Redis keys (see `Command`).
    """
    own_keys = [state for state in call.program.states if state.own is not None]
    return [
        keyspace.own(shards[key], str(own), call.keys[key]) + ending
        for key, own, endings in own_keys
        for ending in endings
    ]


#: The cached bytes of a command. The items are: the run of the server for which the bytes were made; the start and the
#: end of the span for which the bytes are valid (µs since 1970 UTC); and the bytes themselves, which follow the nonce.
_CachedBytes = tuple[str, float, float, bytes]
#: Cached bytes that are never valid.
_NEVER_VALID: _CachedBytes = ("", 0, 0, b"")


class Command:
    """A call as the bytes of a Redis command. It can be sent many times, each time with a new nonce."""

    __slots__ = ("_cached", "_front", "_layout", "call", "full", "is_first", "keyspace", "parts", "script")

    def __init__(self, keyspace: Keyspace, call: Call, *, full: bool | None = None) -> None:
        """Make the command. `full` is as the attribute; if it is None, the known level of memory decides."""
        self.keyspace = keyspace
        self.call = call
        #: In a cluster, the commands that are sent instead of this one, one for each shard. cluster/split.py sets them.
        self.parts: Any = None
        program, usage = call.program, call.counted
        #: Whether the script writes although the server's memory is full.
        self.full = memory.level is Shortage.FULL if full is None else full
        #: Whether the call has a lasting limit (restored from the ledger if Redis loses its state), and this command
        #: was not decided yet in this run of the server.
        self.is_first = program.lasts and call.op is Op.TRY
        self._cached = _NEVER_VALID
        shards = [shard(keyspace, key, call.account, call.in_account) for key in call.keys]
        compared = _shards_to_compare(keyspace, call, shards)
        states, packed_count = state_keys(keyspace, call, shards), program.packed_states
        keys = [*map(keyspace.head, compared), *states[:packed_count]]
        if usage is not None:
            keys.append(keyspace.open(compared[0]))
        if call.receipt is not None:
            keys.append(keyspace.receipts(compared[0]))
        keys_without_state = len(keys) - packed_count
        if len(states) > packed_count:
            # Name all keys. While a cluster moves a slot, a node runs a script only if this node has all named keys.
            keys += [*states[packed_count:], *further_keys(keyspace, call, shards)]
        meters = len(usage.meters) if usage is not None else 0
        names = (call.lease is not None) + (call.receipt is not None)
        #: The deciding script for calls of this shape, and its argument `layout`, which only a general script has.
        self.script, self._layout = _assembled(call, len(compared), keys_without_state, keyspace.slots_move, self.full)
        #: The bytes of the command before the nonce.
        # 7 arguments are always there: EVALSHA, the SHA-1, the number of keys, nonce, head, request and program.
        self._front = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n%b" % (
            7 + len(keys) + (self._layout is not None) + meters + names,
            self.script.sha,
            bulks(b"%d" % len(keys), *[key.encode() for key in keys]),
        )

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP, the protocol of Redis. `run` is the run of the server."""
        cached_run, start, end, rest = self._cached
        # Do not call `clock.now` here: these lines run at every decision, and a call would make them slower.
        if clock.frozen is not None or cached_run != run or not start <= time_ns() // 1000 + clock.difference < end:
            rest = self._rest(run)
        return b"%b$%d\r\n%b\r\n%b" % (self._front, len(nonce), nonce, rest)

    def _rest(self, run: str) -> bytes:
        """Return the bytes of the command after the nonce. They are valid at the moment of the call."""
        now = clock.now() if self.call.now is None else self.call.now
        cached_run, start, end, _rest = self._cached
        if cached_run != run or not start <= now < end:
            self._cached = self._make(run, now)
        return self._cached[3]  # the bytes

    def _make(self, run: str, now: int) -> _CachedBytes:
        """Make the bytes that follow the nonce. Return the cache item: the run, the span of validity, and the bytes."""
        call = self.call
        usage, receipt = call.counted, call.receipt
        packed = call.program.packed(now)
        start, end = packed.start, packed.end
        if self._cached[0] != run:  # the server has another run than at the last call
            self.is_first = call.program.lasts and call.op is Op.TRY
        is_first = self.is_first
        # These arguments follow the program: the layout, the names of the counters, the name of the leases, and the
        # receipt's nonce.
        last_arguments: list[bytes] = []
        if usage is not None and receipt is not None:
            last_arguments = counters_of(usage, receipt.bin)
        elif usage is not None:
            bin_start, until = bin_of(now)
            start, end = max(start, bin_start * MICROSECONDS), min(end, until)
            last_arguments = counters_of(usage, bin_start)
        moment = clock.frozen if call.now is None else call.now
        marks = (call.version is not None) + 2 * is_first
        # The numbers that ARGV[3] begins with. lua/decide.lua describes them, in this order.
        request = (
            -1.0 if moment is None else moment,
            -1.0 if call.timeout == ANY else round(max(call.timeout, 0) * MICROSECONDS),
            *(start, end),
            receipt.at if receipt is not None else 0,
            round(call.receipt_ttl * 1000),
            float(marks),
        )
        if call.lease is not None:
            last_arguments.append(call.lease.encode())
        if receipt is not None:
            last_arguments.append(receipt.nonce.encode())
        if self._layout is not None:
            last_arguments.insert(0, self._layout)
        # Do not cache the bytes of a call that has a fixed moment or a receipt: no other call has the same bytes.
        # `__wrapped__` is the function without its cache.
        make_middle = _middle if moment is None and receipt is None else _middle.__wrapped__
        middle = make_middle(packed.program, f"{call.version or 0} {run}", request, call.costs)
        if clock.frozen is not None or is_first:
            # The next call must not use these bytes: it can have another moment, or it is not the first call any more.
            # A span without length is never valid.
            start = end = now
        return run, start, end, middle + bulks(*last_arguments)


@lru_cache(maxsize=1024)
def _middle(program: bytes, head: str, request: tuple[float, ...], costs: tuple[int, ...]) -> bytes:
    """Return the bytes of a command between the nonce and the names of counters.

    These bytes are the same for all calls of one kind, so they are cached.
    """
    return bulks(head.encode(), struct.pack(f"<{len(request) + len(costs)}d", *request, *costs), program)


def _assembled(call: Call, heads: int, keys_without_state: int, slots_move: bool, full: bool) -> Assembled:
    """Return the deciding script for a call, and the layout of the call if the script is a general one.

    `heads` says how many heads the call compares. `keys_without_state` says how many of the call's Redis keys have no
    states of limits: these are the heads, `open` and the receipt. `full` is as in `Shape`.
    """
    program, usage = call.program, call.counted
    packed_count = program.packed_states

    def position(state: int) -> int:
        """Return the position in KEYS of a state, from its position in `Program.states`. For 0 (no state) return 0."""
        if state == 0:
            return 0
        # Packed states follow the heads. Own keys follow all packed states and all keys without a state.
        return state + (heads if state <= packed_count else keys_without_state)

    shape = Shape(
        op=call.op.name.lower(),
        limits=tuple(
            limit._replace(state_key=position(limit.state_key), own_key=position(limit.own_key))
            for limit in program.limit_shapes
        ),
        heads=heads,
        costs=len(call.costs),
        meters=len(usage.meters) if usage is not None else 0,
        open_key=heads + packed_count + 1,
        virtual=call.virtual,
        at_once=call.at_once,
        whole=call.whole,
        lease=call.lease is not None,
        announces=call.announces,
        counts_refusal=call.counts_refusal,
        slots_move=slots_move,
        full=full,
    )
    return assembled(shape)


class StatesExist:
    """The command that returns how many states Redis has of one key of a call. `position` is the key's position."""

    script = Script(b"", b"")  # the command needs no script

    def __init__(self, keyspace: Keyspace, call: Call, position: int) -> None:
        shards = [shard(keyspace, key, call.account, call.in_account) for key in call.keys]
        names = zip(state_keys(keyspace, call, shards), call.program.states, strict=True)
        self._keys = [name.encode() for name, state in names if state.key == position]

    @property
    def key(self) -> bytes:
        """Return one of the command's Redis keys. In a cluster the node is found by this key."""
        return self._keys[0]

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP."""
        return resp(b"EXISTS", *self._keys)
