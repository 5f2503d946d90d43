"""Count refusals that the script in the account's shard has not counted.

A process refuses some requests from memory, and on a cluster another shard can refuse. Such refusals are counted in the
open batch of the account's shard: the hash in Redis in which the usage of this shard is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.scripts import resp
from ratelimits.engine.call import Usage
from ratelimits.engine.keys import quoted

#: Maximum number of counters of one command. There is a maximum, because the server does nothing else while it executes
#: the command. `python -m benchmarks.bounded` measures a command with this number of counters.
MAX_COUNTERS = 100


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
