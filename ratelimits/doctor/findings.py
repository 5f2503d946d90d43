"""The parts of the app that a server lets work or not, what the project needs, and why parts do not work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from django.db import DatabaseError

from ratelimits.algorithms.limits import Lasting
from ratelimits.conf import conf
from ratelimits.engine.server import Server
from ratelimits.models import Rule

#: What to do if the memory is full, or soon is.
MORE_MEMORY = (
    "If usage waits in Redis, drain it now: run a worker, or the commands ratelimits_seal and ratelimits_drain. If none"
    " waits, raise the server's maxmemory."
)


class Part(StrEnum):
    """A part of the app that needs commands of the server."""

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


#: The algorithms that need commands of their own.
_WITH_OWN_COMMANDS = {"sliding_log": Part.LOGS, "concurrency": Part.LEASES}


#: What each project needs, also one without a rule.
ALWAYS = (Part.LIMITS, Part.COUNTS, Part.EDITS)


def needed() -> frozenset[Part]:
    """Return the parts that the project's rules, settings and code need. If the rules cannot be read: all but TRIES."""
    parts = {*ALWAYS}
    if "ratelimits.outbound" in sys.modules:
        # Rates of outbound calls are in code. They can have any algorithm.
        parts |= {Part.LOGS, Part.LEASES, Part.WAITS}
    try:
        for rule in Rule.objects.using(conf.DATABASE).exclude(mode=Rule.Mode.OFF).select_related("plan"):
            if part := _WITH_OWN_COMMANDS.get(rule.algorithm):
                parts.add(part)
            if rule.bills:
                parts.add(Part.BILLS)
            if rule.restored() is not Lasting.NO:
                parts |= {Part.RESTORES, Part.BILLS}
    except DatabaseError:
        return frozenset(Part) - {Part.TRIES}
    return frozenset(parts)


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
