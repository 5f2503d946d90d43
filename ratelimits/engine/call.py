"""The arguments of one call of the deciding script (lua/decide.lua), and what they consist of.

`engine/command.py` makes the Redis command that sends a call. CONTRIBUTING.md explains the words of the project, such
as program, shard, bin and run.
"""

from __future__ import annotations

import itertools
import os
import secrets
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.engine.keys import BIN_SECONDS, Keyspace, account_shard, quoted, shard_of
from ratelimits.engine.program import Program

#: The timeout of a call that accepts any wait.
ANY = float("inf")
#: The key under which usage without an account is counted.
ANONYMOUS_KEY = "anonymous"
#: Length of a bin of usage (15 minutes), in µs.
_BIN = BIN_SECONDS * MICROSECONDS


class Op(IntEnum):
    """The operations of the script.

    TRY      decide a request, and charge it if it is admitted
    PEEK     decide a request without charging it
    REFUND   give back permits without a receipt
    RELEASE  end leases
    RESET    delete the states of the limits. Lasting limits get a new state instead
    CREATE   make states that do not exist yet
    CHANGE   write existing states with the current parameters
    SETTLE   use a receipt: change its charge to the true costs, or refund it
    RESTORE  raise the counts of lasting limits to the costs of the call, if Redis has perhaps lost these counts

    A lasting limit is a limit whose count is restored from the ledger if Redis has lost its state. Only the simulator
    uses REFUND, CREATE and CHANGE.
    """

    TRY = 1
    PEEK = 2
    REFUND = 3
    RELEASE = 4
    RESET = 5
    CREATE = 6
    CHANGE = 7
    SETTLE = 8
    RESTORE = 9


class Meter(NamedTuple):
    """A meter that counts a request, such as "requests" or "tokens".

    `rule` is the id of the rule that bills the meter, and `version` is the rule's version. Both are 0 if no rule bills.
    """

    name: str
    rule: int = 0
    version: int = 0


class Usage(NamedTuple):
    """Whose request it is, in which meters it has costs, and whether it is counted.

    account  the account's identifier; "" if the request has no account
    key      the request's key, such as "user:42"
    meters   the meters of the request. A call's costs begin with one cost for each meter, in this order
    counted  whether the script counts the request in these meters. Without the floor that counts, it does not
    """

    account: str
    key: str
    meters: tuple[Meter, ...]
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Receipt:
    """The permits that an admitted request took. Any process can refund or settle a receipt, but only once.

    A receipt is plain data, so it can be pickled or stored.

    nonce    the name of the call that took the permits
    program  the limits that were charged
    keys, costs, account, usage, in_account  have the same meaning as in `Call`
    at       the moment of the decision, in µs since 1970 UTC
    bin      start of the bin (15 minutes) in which the request was counted, in seconds since 1970 UTC
    lease    the name of the request's leases. If it is None, the name is the nonce
    moments  the moment of the decision for each key, if a cluster decided shard by shard; otherwise empty
    """

    nonce: str
    program: Program
    keys: tuple[str, ...]
    costs: tuple[int, ...]
    account: str
    usage: Usage | None
    at: int
    bin: int
    lease: str | None = None
    moments: tuple[int, ...] = ()
    in_account: tuple[str, ...] = ()


class Call(NamedTuple):
    """One call of the script: a program (compiled limits), the limited keys and the costs of a request.

    keys         the limited keys, such as "user:42". The shard of a key depends only on the key, except for the keys of
                 `in_account`
    in_account   the beginnings of the keys that are in the shard of `account`, such as ("user:",). These keys have only
                 this account: otherwise they would have a counter for each of their accounts
    costs        one cost for each meter. Further costs of limits can follow. The `slot` of a term is a position in this
                 tuple. If a receipt is settled and less was used than charged, a cost is negative
    usage        whose request it is, and where it is counted. If it is None, the request is not counted
    timeout      the longest accepted wait, in seconds; ANY for any wait
    version      version of the caller's rules; None for limits that do not come from rules
    now          the moment of the decision, in µs since 1970 UTC, for tests and simulations. If it is None, the
                 server's time is used
    lease        name of the leases that a `concurrency` limit gives or ends. If it is None, the name is the nonce of
                 the call
    virtual      true if the clock is virtual (in the simulator), so that nothing expires
    receipt      the receipt that is settled or refunded
    whole        true if the whole receipt is refunded
    at_once      true if a request that would have to wait is refused, whatever the timeouts are
    receipt_ttl  seconds for which a receipt can be settled or refunded
    announces    true if a caller that a `concurrency` limit refuses will wait until another request releases its lease
    counts_refusal  whether a refusal is counted as a denied request
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
    counts_refusal: bool = True
    in_account: tuple[str, ...] = ()

    @property
    def counted(self) -> Usage | None:
        """Return where the request is counted; None if it is not counted."""
        usage = self.usage
        return usage if usage is not None and usage.counted else None


#: A random name of this process, and a counter of its calls. A nonce consists of this name and the call's number.
_process_name = b""
_call_numbers = itertools.count()


def _reseed() -> None:
    """Choose a new name for this process. A forked child needs one: otherwise it would use its parent's nonces."""
    global _process_name, _call_numbers
    _process_name, _call_numbers = secrets.token_hex(6).encode(), itertools.count()


_reseed()
os.register_at_fork(after_in_child=_reseed)


def new_nonce() -> bytes:
    """Return a nonce: a name for one call, in hexadecimal. No other call of any process has the same name."""
    return b"%b%x" % (_process_name, next(_call_numbers))


def shard(keyspace: Keyspace, key: str, account: str = "", in_account: tuple[str, ...] = ()) -> int:
    """Return the shard of a key: the shard of `account` for a key of `in_account`, otherwise the key's own shard."""
    if key.startswith(("account:", "account@")):  # "account@12:7" is the account 7 of another customer
        return account_shard(key.partition(":")[2], keyspace.shards)
    if account and key.startswith(in_account):
        return account_shard(account, keyspace.shards)
    return shard_of(key, keyspace.shards)


def shard_of_usage(keyspace: Keyspace, usage: Usage) -> int:
    """Return the shard that counts a request: the account's shard, or the key's shard if there is no account."""
    return account_shard(usage.account, keyspace.shards) if usage.account else shard_of(usage.key, keyspace.shards)


def bin_of(now: int) -> tuple[int, int]:
    """Return the start of the bin that contains `now`, in seconds, and its end. `now` and the end are in µs."""
    start = now // _BIN * _BIN
    return start // MICROSECONDS, start + _BIN


def counters_of(usage: Usage, bin_start: int) -> list[bytes]:
    """Return the names of the counters of an admitted request, one for each meter."""
    who = f"{quoted(usage.account)}|{quoted(usage.key)}"
    return [f"a|{bin_start}|{meter}|{who}".encode() for meter in _meter_texts(usage.meters)]


@lru_cache(maxsize=1024)
def _meter_texts(meters: tuple[Meter, ...]) -> list[str]:
    """Return for each meter the part "meter|rule|version" of a counter's name."""
    return [f"{quoted(meter.name)}|{meter.rule}|{meter.version}" for meter in meters]
