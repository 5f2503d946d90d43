"""Count requests that the script in the account's shard has not counted: refusals, and spent prefetched permits.

A process refuses some requests from memory, and on a cluster another shard can refuse. Such refusals are counted in the
open batch of the account's shard: the hash in Redis in which the usage of this shard is counted. So are the requests
that spent prefetched permits. CONTRIBUTING.md explains words such as prefetch, bin and nonce.

While some requests of a prefetch are perhaps not counted, the prefetch has a record in Redis, in a hash of its shard.
The record is the text "<counted> <requests> <until> <counter> <cost> …":

counted   how many requests of the prefetch are counted
requests  how many requests at most can spend the permits of the prefetch
until     the moment (µs since 1970 UTC) until which the permits can be spent
counter   the name of a meter's counter in a batch of usage. It is followed by the cost of one request in this meter
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple
from urllib.parse import unquote

from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.scripts import resp
from ratelimits.engine.call import Receipt, Usage, counters_of, shard_of_usage
from ratelimits.engine.keys import Keyspace, ledger_name, quoted

#: Maximum number of counters of one command. There is a maximum, because the server does nothing else while it executes
#: the command. `python -m benchmarks.bounded` measures a command with this number of counters.
MAX_COUNTERS = 100
#: Maximum number of counters that the prefetches of one command have together. There is a maximum, because the server
#: does nothing else while it executes the command. `python -m benchmarks.bounded` measures such a command.
MAX_SPENT_COUNTERS = 50


@dataclass(frozen=True, slots=True)
class RefusalCount:
    """The number of requests with the same costs that one rule has refused.

    `costs` has the cost of one request in each meter of `usage`. `rule` and `version` are the rule's id and the version
    of its row. `requests` is the number of requests.
    """

    usage: Usage
    costs: tuple[int, ...]
    rule: int
    version: int
    requests: int


def in_bounds(counted: Iterable[RefusalCount]) -> Iterator[list[RefusalCount]]:
    """Yield the counts in groups for one command each, so that no group has more than MAX_COUNTERS counters."""
    group: list[RefusalCount] = []
    counters = 0
    for one in counted:
        if group and counters + len(one.costs) > MAX_COUNTERS:
            yield group
            group, counters = [], 0
        group.append(one)
        counters += len(one.costs)
    if group:
        yield group


class Count:
    """The command that counts refusals in one shard. Give it at most MAX_COUNTERS counters (see `in_bounds`).

    `kind` is "d" for denied requests, and "s" for admitted requests that a shadow rule would have refused.
    """

    script = scripts.read(
        "memory/full", "run", "batch", "counting/shard_run", "counting/usage", "counting/usage_new", "counting/count"
    )

    def __init__(self, head: str, open_batch: str, kind: Literal["d", "s"] = "d") -> None:
        self._keys = [head.encode(), open_batch.encode()]
        self._kind = kind.encode()
        #: Three arguments for each counter: the end of its name, the cost of one request, the number of requests.
        self._counters: list[bytes] = []

    @property
    def key(self) -> bytes:
        """Return one of the command's Redis keys. In a cluster the node is found by this key."""
        return self._keys[0]

    def add(self, counted: RefusalCount) -> None:
        """Add refusals to the command."""
        usage = counted.usage
        for meter, cost in zip(usage.meters, counted.costs, strict=True):
            name = f"{quoted(meter.name)}|{counted.rule}|{counted.version}|{quoted(usage.account)}|{quoted(usage.key)}"
            self._counters += [name.encode(), b"%d" % cost, b"%d" % counted.requests]

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP. `run` is the run of the server."""
        arguments = [run.encode(), nonce, self._kind, *self._counters]
        return resp(b"EVALSHA", self.script.sha, b"2", *self._keys, *arguments)


class Spent(NamedTuple):
    """How many requests have spent permits of one prefetch. `is_all` is true if no request will spend more of them."""

    nonce: str
    requests: int
    is_all: bool


class Uncounted(NamedTuple):
    """Requests of one prefetch that are not counted in one meter, although a process has perhaps admitted them.

    until     the moment until which a process could spend the permits, in µs since 1970 UTC
    requests  how many requests these are at most
    bin       start of the bin in which the requests would be counted, in seconds since 1970 UTC
    cost      units of one request
    """

    until: int
    requests: int
    account: str
    key: str
    meter: str
    bin: int
    cost: int


def record(receipt: Receipt, requests: int, until: int) -> bytes:
    """Return the record of a new prefetch. The first costs of `receipt` are the cost of one request in each meter.

    `requests` and `until` are explained at the top of this file.
    """
    assert receipt.usage is not None
    counters = counters_of(receipt.usage, receipt.bin)
    costs = receipt.costs[: len(counters)]
    return b" ".join([b"0 %d %d" % (requests, until), *(b"%b %d" % pair for pair in zip(counters, costs, strict=True))])


def uncounted(text: bytes) -> list[Uncounted]:
    """Return, for each meter of a record, the requests that are perhaps not counted.

    Raise ValueError if `text` is not a record.
    """
    counted, requests, until, *rest = text.decode().split(" ")
    result = []
    for counter, cost in zip(rest[::2], rest[1::2], strict=True):
        _kind, bin_start, meter, _rule, _version, account, key = counter.split("|")
        account, key, meter = (ledger_name(unquote(name)) for name in (account, key, meter))
        result.append(
            Uncounted(int(until), int(requests) - int(counted), account, key, meter, int(bin_start), int(cost))
        )
    return result


class CountSpent:
    """The command that counts the requests of prefetches in one shard, and records a new prefetch.

    Give it prefetches that have at most MAX_SPENT_COUNTERS counters together. A prefetch has one counter for each
    meter.

    new  nonce and record of the new prefetch; None if there is no new prefetch
    """

    script = scripts.read(
        "memory/full", "run", "batch", "counting/shard_run", "counting/usage", "counting/usage_new", "counting/spent"
    )

    def __init__(
        self, keyspace: Keyspace, shard: int, spent: Sequence[Spent], new: tuple[str, bytes] | None = None
    ) -> None:
        names = (keyspace.head, keyspace.open, keyspace.prefetched)
        self._keys = [name(shard).encode() for name in names]
        nonce, text = new or ("", b"")
        self._arguments = [nonce.encode(), text]
        for one in spent:
            self._arguments += [one.nonce.encode(), b"%d" % one.requests, b"%d" % one.is_all]

    @property
    def key(self) -> bytes:
        """Return one of the command's Redis keys. In a cluster the node is found by this key."""
        return self._keys[0]

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        """Return the command in RESP. `run` is the run of the server."""
        number_of_keys = b"%d" % len(self._keys)
        return resp(b"EVALSHA", self.script.sha, number_of_keys, *self._keys, run.encode(), nonce, *self._arguments)


def shard_of_receipt(keyspace: Keyspace, receipt: Receipt) -> int:
    """Return the shard that counts the requests of a prefetch."""
    assert receipt.usage is not None
    return shard_of_usage(keyspace, receipt.usage)
