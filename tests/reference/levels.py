"""token_bucket, gcra, leaky_bucket: spent permits drain at rate/period; a cost passes if it fits below the capacity."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

from tests.reference.amounts import SECOND, exact, six_places, whole
from tests.reference.limit import NO_HOPE, Limit, Verdict


@dataclass(frozen=True, slots=True)
class Level:
    spent: Fraction
    as_of: int


class _Levelled(Limit):
    lends: bool

    def __init__(self, data: dict[str, Any]) -> None:
        self.capacity = self.shown = whole(data, "capacity", 0)
        self.permit = six_places(data, "period", 1) * SECOND / six_places(data, "rate")
        self.initial = Fraction(0)

    def spent(self, state: Level, now: int) -> Fraction:
        return max(Fraction(0), state.spent - (now - state.as_of) / self.permit)

    def born(self, now: int) -> Level:
        return Level(self.initial, now)

    def judge(self, state: Level, now: int, cost: int, patience: int | None) -> Verdict:
        if cost > self.capacity:
            return NO_HOPE
        lack = max(0, ceil((self.spent(state, now) + cost - self.capacity) * self.permit))
        if not self.lends:
            return Verdict(lack)
        if patience is None or lack <= patience:
            return Verdict(0, lack)
        return Verdict(lack - patience)

    def charged(self, state: Level, now: int, cost: int, lease: str) -> Level:
        return Level(self.spent(state, now) + cost, now)

    def refunded(self, state: Level, now: int, cost: int, lease: str) -> Level:
        spent = self.spent(state, now)
        if not spent:
            return state
        return Level(state.spent - cost if spent > cost else Fraction(0), state.as_of)

    def jumped(self, state: Level, newest: int, to: int) -> Level:
        return Level(state.spent, state.as_of - (newest - to))

    def handed_over(self, state: Level, now: int, new: _Levelled) -> Level:
        return Level(self.spent(state, now), now)

    def remaining(self, state: Level, now: int) -> int:
        return max(0, floor(self.capacity - self.spent(state, now)))

    def reset_after(self, state: Level, now: int) -> int:
        return ceil(self.spent(state, now) * self.permit)


class TokenBucket(_Levelled):
    algorithm = "token_bucket"
    lends = True

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        tokens = data.get("initial")
        if tokens is None or tokens == "full":
            full = Fraction(self.capacity)
        elif tokens == "empty":
            full = Fraction(0)
        else:
            full = exact(data, "initial")
            if full.denominator != 1 or not 0 <= full <= self.capacity:
                raise ValueError(f"initial must be full, empty or 0 to capacity, not {tokens!r}")
        self.initial = self.capacity - full


class Gcra(_Levelled):
    algorithm = "gcra"
    lends = True


class LeakyBucket(_Levelled):
    algorithm = "leaky_bucket"
    lends = False
