"""Count refusals that the account's shard did not decide itself.

A process refuses some requests from memory, and on a cluster another shard can refuse. Such refusals are counted in the
open batch of the account's shard (the hash in Redis in which usage is counted).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from ratelimits.engine import scripts
from ratelimits.engine.call import Usage
from ratelimits.engine.keys import quoted
from ratelimits.engine.resp import resp


@dataclass(frozen=True, slots=True)
class Counted:
    """A number of refused requests that have the same costs and were refused by the same rule.

    `costs` are those of one request, one for each meter of `usage`.
    """

    usage: Usage
    costs: tuple[int, ...]
    rule: int
    version: int
    requests: int


class Count:
    """The command that counts refusals in one shard, for one account's billing periods.

    `kind` is "d" for denied requests. It is "s" for admitted requests that a shadow rule would have refused.
    """

    script = scripts.read("run", "batch", "usage", "count")

    def __init__(self, head: str, open_batch: str, usage: Usage, kind: Literal["d", "s"] = "d") -> None:
        self._keys = [head.encode(), open_batch.encode()]
        self._periods = struct.pack("<dddd", *usage.periods) + kind.encode()
        #: Three arguments for each counter: its name, the cost of one request, the number of requests.
        self._counters: list[bytes] = []

    @property
    def key(self) -> bytes:
        """Return one of the command's Redis keys. A cluster finds the node by this key."""
        return self._keys[0]

    def add(self, counted: Counted) -> None:
        """Add refusals to the command."""
        usage = counted.usage
        for meter, cost in zip(usage.meters, counted.costs, strict=True):
            field = f"{quoted(meter.name)}|{counted.rule}|{counted.version}|{quoted(usage.account)}|{quoted(usage.key)}"
            self._counters += [field.encode(), b"%d" % cost, b"%d" % counted.requests]

    def to(self, run: str, name: bytes) -> bytes:
        """Return the command in RESP. `run` is the run of the server, `name` is the nonce."""
        arguments = [run.encode(), name, self._periods, *self._counters]
        return resp(b"EVALSHA", self.script.sha, b"2", *self._keys, *arguments)
