"""The parts of the app that a server lets work or not, what the project needs, and why parts do not work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from django.db import DatabaseError

from ratelimits.algorithms.limits import Lasting
from ratelimits.conf import conf
from ratelimits.engine.server import Server
from ratelimits.models import Rule


class Part(StrEnum):
    """A part of the app that needs commands of the server. `installed` returns those that are installed."""

    LIMITS = "limits"
    LOGS = "sliding_log"
    LEASES = "concurrency"
    COUNTS = "counts"
    BILLS = "bills"
    RESTORES = "restores"
    WAITS = "waits"
    EDITS = "edits"
    TRIES = "tries"

    @property
    def meaning(self) -> str:
        """Return what the part does, for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Part.LIMITS: "decide requests by most algorithms",
    Part.LOGS: "decide requests by the algorithm sliding_log",
    Part.LEASES: "decide requests by the algorithm concurrency",
    Part.COUNTS: "count usage",
    Part.BILLS: "bring the counted usage to the ledger, from which bills are made",
    Part.RESTORES: "restore counts from the ledger after the server has lost them",
    Part.WAITS: "let outbound calls wait until a lease is released",
    Part.EDITS: "apply an edit of the rules at once, in all processes",
    Part.TRIES: "try a rule before it is saved (the admin, ratelimits_simulate)",
}


#: The parts that need no ledger.
_OF_LIMITS = frozenset({Part.LIMITS, Part.LOGS, Part.LEASES, Part.WAITS, Part.EDITS, Part.TRIES})


@dataclass(slots=True)
class Ledger:
    """What the doctor asks the floor of usage: nothing, until that floor installs its own functions.

    walks          by part: goes the whole way of the part on the doctor's Redis keys (a `Scratch`)
    failures       what these functions raise if the part does not work
    of_fence       takes such an error, the Redis keys, the user of the app (`Who`), and the rights for commands that
                   the fence would have sent later. Returns the finding if the error is about the fence, else None
    another_fence  returns what to do where nobody can change the server
    other_fences   takes the Redis keys, and returns a sentence about the other values of RATELIMITS["FENCE"]
    """

    walks: Mapping[Part, Callable[[Any], None]] = field(default_factory=dict)
    failures: tuple[type[Exception], ...] = ()
    of_fence: Callable[[Exception, Any, Any, Sequence[str]], ServerFinding | None] = lambda *_asked: None
    another_fence: Callable[[], str] = str
    other_fences: Callable[[Any], str] = lambda _keys: ""


ledger = Ledger()


def installed() -> tuple[Part, ...]:
    """Return the parts that are installed, in the order in which they are tried and shown."""
    return tuple(part for part in Part if part in _OF_LIMITS or part in ledger.walks)


def more_memory() -> str:
    """Return what to do if the memory is full, or soon is."""
    if Part.COUNTS not in installed():
        return "Raise the server's maxmemory."
    return (
        "If usage waits in Redis, drain it now: run a worker, or the commands ratelimits_seal and ratelimits_drain. If"
        " none waits, raise the server's maxmemory."
    )


#: The algorithms that need commands of their own.
_WITH_OWN_COMMANDS = {"sliding_log": Part.LOGS, "concurrency": Part.LEASES}


#: What each project needs of the installed parts, also one without a rule.
ALWAYS = (Part.LIMITS, Part.COUNTS, Part.EDITS)


def needed() -> frozenset[Part]:
    """Return the parts that the project's rules, settings and code need. If the rules cannot be read: all but TRIES.

    Parts that are not installed are left out.
    """
    found = {*ALWAYS}
    if "ratelimits.outbound" in sys.modules:
        # Rates of outbound calls are in code. They can have any algorithm.
        found |= {Part.LOGS, Part.LEASES, Part.WAITS}
    try:
        for rule in Rule.objects.using(conf.DATABASE).exclude(mode=Rule.Mode.OFF).select_related("plan"):
            if part := _WITH_OWN_COMMANDS.get(rule.algorithm):
                found.add(part)
            if rule.bills:
                found.add(Part.BILLS)
            if rule.restored() is not Lasting.NO:
                found |= {Part.RESTORES, Part.BILLS}
    except DatabaseError:
        return frozenset(installed()) - {Part.TRIES}
    return frozenset(found.intersection(installed()))


def counts_usage(server: Server) -> bool:
    """Return whether usage is counted: a rule applies, or a batch waits in Redis.

    Each request that has a rule is counted, also if no rule bills. Raise the errors of the database and of redis-py.
    """
    return Rule.objects.using(conf.DATABASE).exclude(mode=Rule.Mode.OFF).exists() or batches_wait(server)


def batches_wait(server: Server) -> bool:
    """Return whether a batch waits in Redis. Raise the errors of redis-py."""
    keyspace = server.keyspace
    for client, shards in server.wire.servers(keyspace, range(keyspace.shards)):
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.exists(keyspace.open(shard), keyspace.sealed(shard))
            if any(pipeline.execute()):
                return True
    return False


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One thing that is wrong with a server.

    name   an identifier, such as "command:HSET" or "evicts"
    parts  the parts that do not work because of it. If it is empty, everything works, but people should know it
    why    a sentence that says what is wrong
    mend   what to do: an ACL line, or a setting
    acl    the words for `ACL SETUSER <user>` that would change it; "" if no right would
    """

    name: str
    parts: frozenset[Part]
    why: str
    mend: str
    acl: str = ""

    @property
    def endangers(self) -> bool:
        """Return whether the parts work now, but can lose what they have written."""
        return self.name in ("evicts", "replay")


def merged(findings: Iterable[ServerFinding]) -> Iterator[ServerFinding]:
    """Yield findings of the same name as one, with the parts of all of them."""
    by_name: dict[str, ServerFinding] = {}
    for found in findings:
        first = by_name.get(found.name)
        by_name[found.name] = found if first is None else replace(first, parts=first.parts | found.parts)
    yield from by_name.values()
