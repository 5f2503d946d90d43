"""A process that prefetches permits, with a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

from ratelimits.engine.call import Call, Op
from ratelimits.engine.command import Command
from ratelimits.engine.decide import call_for, decide_call
from ratelimits.engine.program import program
from ratelimits.engine.server import current_server
from ratelimits.quota import spending
from ratelimits.quota.prefetch import Fetch, PrefetchedPermits
from tests.support.engine.asking import NOW, SECOND, limit, usage
from tests.support.entry_points import Clock


def call(capacity: int = 1000, period: int = 60, cost: int = 1, key: str = "user:1") -> Call:
    window = limit("fixed_window", key=key, capacity=capacity, period=period, cost=cost)
    return call_for([window], account="acme", usage=usage(key=key), now=NOW)


class Process:
    """The prefetched permits of one process; `requests` happen at one moment of the server's clock and its own."""

    def __init__(self, asked: Call, most: int = 64, seconds: float = 1.0, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.takes: list[Fetch] = []
        self.asked = asked
        self._began = self.clock.now
        # A limit and a meter have the same cost in a call that a prepared command makes.
        slots = tuple(replace(term, slot=0) for term in asked.program.terms)
        asked = asked._replace(program=program(slots), costs=asked.costs[:1])
        self.permits = PrefetchedPermits(current_server(), asked, most, seconds, self.clock)

    def now(self) -> int:
        """Return the server's time, in µs since 1970 UTC."""
        return NOW + round((self.clock.now - self._began) * SECOND)

    def request(self) -> bool:
        """Return whether one request is admitted."""
        while True:
            if self.permits.spend() is not None:
                return True
            fetch = self.permits.next_fetch()
            self.takes.append(fetch)
            asked = fetch.command.call._replace(now=self.now())
            decision = decide_call(current_server(), asked, Command(current_server().keyspace, asked))
            taken = self.permits.take(fetch, decision)
            if taken is not None:
                spending.send(self.permits, taken[1])
                return taken[0].allowed

    def left(self) -> int:
        """Return how many permits are left on the server."""
        asked = self.asked._replace(op=Op.PEEK, now=self.now())
        return decide_call(current_server(), asked).remaining

    @property
    def sizes(self) -> list[int]:
        return [fetch.size for fetch in self.takes]
