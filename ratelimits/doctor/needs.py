"""Say which parts of the app the project needs, and whether it counts usage."""

from __future__ import annotations

import sys

from django.db import DatabaseError

from ratelimits.algorithms.limits import Lasting
from ratelimits.conf import conf
from ratelimits.doctor.parts import Part
from ratelimits.engine.server import Server
from ratelimits.models import Rule

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
