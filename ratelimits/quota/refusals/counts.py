"""Keep the counts of refusals that a process could not send to Redis, in a bounded part of its memory.

While Redis is away, a process keeps the counts of the requests that it refused from memory. Equal counts are added up.
If there are too many different counts, the further ones are not kept. They are declared instead: the process totals
state them, and the reports print them as a gap. Denied requests are not billed.
"""

from __future__ import annotations

from ratelimits.engine.call import Usage
from ratelimits.engine.counting import RefusalCount
from ratelimits.logs import bounded
from ratelimits.quota.counting import counting

logger = bounded(__name__)

#: Maximum number of counters that a `RefusalCounts` keeps. A request has one counter for each of its meters.
MAX_COUNTERS = 50_000

#: What is counted: the fields of a RefusalCount, without its number of requests.
_Subject = tuple[Usage, tuple[int, ...], int, int]


class RefusalCounts:
    """Counts of refusals that wait to be sent. The caller must hold a lock."""

    def __init__(self) -> None:
        self._requests: dict[_Subject, int] = {}
        self._counters = 0

    def __len__(self) -> int:
        """Return the number of counters."""
        return self._counters

    def add(self, counted: RefusalCount) -> None:
        """Keep a count. If there are too many counters already, declare it instead."""
        subject = counted.usage, counted.costs, counted.rule, counted.version
        if subject not in self._requests:
            counters = max(len(counted.costs), 1)
            if self._counters + counters > MAX_COUNTERS:
                logger.error("Too many refusals wait to be counted as denied. The further ones are declared as a gap.")
                declare(counted)
                return
            self._counters += counters
        self._requests[subject] = self._requests.get(subject, 0) + counted.requests

    def take(self) -> list[RefusalCount]:
        """Return all counts, and forget them."""
        taken = [RefusalCount(*subject, requests) for subject, requests in self._requests.items()]
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget all counts."""
        self._requests.clear()
        self._counters = 0


def declare(counted: RefusalCount) -> None:
    """Declare refusals that are perhaps not counted as denied: add them to the process totals, which state a gap."""
    usage = counted.usage
    costs = {meter.name: cost for meter, cost in zip(usage.meters, counted.costs, strict=True)}
    counting.add("uncounted", usage.account, usage.key, costs, counted.requests)
