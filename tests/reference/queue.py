"""leaky_bucket_queue: requests proceed at equal distances in time, and at most `capacity` wait."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

from tests.reference.amounts import SECOND, six_places, whole
from tests.reference.limit import NO_HOPE, Limit, Verdict


@dataclass(frozen=True, slots=True)
class Line:
    next: Fraction


NOBODY = Fraction(-(10**30))
"""As `next`: nobody is ahead, at whatever moment."""


class LeakyBucketQueue(Limit):
    algorithm = "leaky_bucket_queue"

    def __init__(self, data: dict[str, Any]) -> None:
        self.capacity = self.shown = whole(data, "capacity", 0)
        self.permit = six_places(data, "period", 1) * SECOND / six_places(data, "rate")
        self.delay_after = whole(data, "delay_after", 0, 0)

    def ahead(self, state: Line, now: int) -> Fraction:
        return max(Fraction(0), state.next - now) / self.permit

    def born(self, now: int) -> Line:
        return Line(Fraction(now))

    def judge(self, state: Line, now: int, cost: int, patience: int | None) -> Verdict:
        if not self.capacity or cost > self.capacity + 1:
            return NO_HOPE
        ahead = self.ahead(state, now)
        wait = max(Fraction(0), ahead - self.delay_after) * self.permit
        crowd = ahead + cost - 1 - self.capacity
        haste = Fraction(-1) if patience is None else wait - patience
        late = max(crowd * self.permit, haste)
        return Verdict(0, ceil(wait)) if late <= 0 else Verdict(ceil(late))

    def charged(self, state: Line, now: int, cost: int, lease: str) -> Line:
        return Line(max(state.next, Fraction(now)) + cost * self.permit)

    def refunded(self, state: Line, now: int, cost: int, lease: str) -> Line:
        ahead = self.ahead(state, now)
        if not ahead:
            return state
        return Line(state.next - cost * self.permit if ahead > cost else NOBODY)

    def jumped(self, state: Line, newest: int, to: int) -> Line:
        return Line(state.next - (newest - to))

    def handed_over(self, state: Line, now: int, new: LeakyBucketQueue) -> Line:
        return Line(now + self.ahead(state, now) * new.permit)

    def remaining(self, state: Line, now: int) -> int:
        return max(0, floor(self.capacity + 1 - self.ahead(state, now))) if self.capacity else 0

    def reset_after(self, state: Line, now: int) -> int:
        return max(0, ceil(state.next - now))
