"""The parts of the app that a server lets work or not, and which of them the project needs."""

from __future__ import annotations

import sys
from enum import StrEnum

from django.db import DatabaseError

from ratelimits.algorithms.limits import Lasting
from ratelimits.conf import conf
from ratelimits.models import Rule


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
