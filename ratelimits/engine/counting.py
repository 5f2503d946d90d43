"""Count refusals that no decision in the account's shard has counted: in the open batch of that shard."""

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
    """Refusals to count: a number of requests, each with these costs by meter, refused by one rule."""

    usage: Usage
    costs: tuple[int, ...]
    rule: int
    version: int
    requests: int


class Count:
    """The command that counts refusals in one shard, for one account's billing periods.

    `kind` is "d" for denied requests, or "s" for admitted ones that a shadow rule would have refused.
    """

    script = scripts.read("run", "batch", "usage", "count")

    def __init__(self, head: str, open_batch: str, usage: Usage, kind: Literal["d", "s"] = "d") -> None:
        self._keys = [head.encode(), open_batch.encode()]
        self._periods = struct.pack("<dddd", *usage.periods) + kind.encode()
        self._threes: list[bytes] = []

    @property
    def key(self) -> bytes:
        """Return one of its keys, by which a cluster finds the node."""
        return self._keys[0]

    def add(self, counted: Counted) -> None:
        """Add refusals to the command."""
        usage = counted.usage
        for meter, cost in zip(usage.meters, counted.costs, strict=True):
            field = f"{quoted(meter.name)}|{counted.rule}|{counted.version}|{quoted(usage.account)}|{quoted(usage.key)}"
            self._threes += [field.encode(), b"%d" % cost, b"%d" % counted.requests]

    def to(self, run: str, name: bytes) -> bytes:
        """Return the command in RESP."""
        arguments = [run.encode(), name, self._periods, *self._threes]
        return resp(b"EVALSHA", self.script.sha, b"2", *self._keys, *arguments)
