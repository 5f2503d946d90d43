"""concurrency: at most `capacity` permits are taken at once; a permit is taken until its lease is released or ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.reference.amounts import duration, whole
from tests.reference.limit import NO_HOPE, PASS, Limit, Verdict


@dataclass(frozen=True, slots=True)
class Lease:
    name: str
    permits: int
    ends: int


Leases = tuple[Lease, ...]
"""Oldest first."""


class Concurrency(Limit):
    algorithm = "concurrency"

    def __init__(self, data: dict[str, Any]) -> None:
        self.capacity = self.shown = whole(data, "capacity", 0)
        self.lease_ttl = duration(data, "lease_ttl")

    def live(self, state: Leases, now: int) -> Leases:
        return tuple(lease for lease in state if now < lease.ends)

    def used(self, state: Leases, now: int) -> int:
        return sum(lease.permits for lease in self.live(state, now))

    def born(self, now: int) -> Leases:
        return ()

    def judge(self, state: Leases, now: int, cost: int, patience: int | None) -> Verdict:
        if cost > self.capacity:
            return NO_HOPE
        excess = self.used(state, now) + cost - self.capacity
        if excess <= 0:
            return PASS
        for lease in sorted(self.live(state, now), key=lambda lease: lease.ends):
            excess -= lease.permits
            if excess <= 0:
                return Verdict(lease.ends - now)
        raise AssertionError("nothing in flight refuses")

    def charged(self, state: Leases, now: int, cost: int, lease: str) -> Leases:
        return (*self.live(state, now), Lease(lease, cost, now + self.lease_ttl))

    def refunded(self, state: Leases, now: int, cost: int, lease: str) -> Leases:
        left = []
        for held in reversed(state):
            back = min(cost, held.permits) if held.name == lease and now < held.ends else 0
            cost -= back
            if held.permits > back:
                left.append(replace(held, permits=held.permits - back))
        return tuple(reversed(left))

    def released(self, state: Leases, now: int, lease: str) -> Leases:
        return tuple(held for held in state if held.name != lease or held.ends <= now)

    def jumped(self, state: Leases, newest: int, to: int) -> Leases:
        return tuple(replace(lease, ends=lease.ends - (newest - to)) for lease in state)

    def handed_over(self, state: Leases, now: int, new: Concurrency) -> Leases:
        return self.live(state, now)

    def remaining(self, state: Leases, now: int) -> int:
        return max(0, self.capacity - self.used(state, now))

    def reset_after(self, state: Leases, now: int) -> int:
        return max((lease.ends - now for lease in self.live(state, now)), default=0)
