"""The parts of the app that a server lets work or not."""

from __future__ import annotations

from enum import StrEnum


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
