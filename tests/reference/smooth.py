"""smooth_bursty and smooth_warming_up: Guava's formulas, truncated to whole µs where Guava truncates."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any

from tests.reference.amounts import SECOND, number, six_places
from tests.reference.limit import Limit, Verdict


@dataclass(frozen=True, slots=True)
class Store:
    stored: Fraction
    next: int


class _Smooth(Limit):
    top: Fraction
    """Most permits that can be stored."""
    refill: Fraction
    """µs of idleness that store one permit."""

    def __init__(self, data: dict[str, Any]) -> None:
        rate = six_places(data, "rate")
        self.shown = int(rate) if rate.denominator == 1 else float(rate)
        self.rate = rate / six_places(data, "period", 1)
        self.stable = SECOND / self.rate

    def stored_wait(self, stored: Fraction, spend: Fraction) -> int:
        """Return the µs that it takes to use up `spend` of the stored permits."""
        raise NotImplementedError

    def synced(self, state: Store, now: int) -> Store:
        if now <= state.next:
            return state
        return Store(min(self.top, state.stored + (now - state.next) / self.refill), now)

    def judge(self, state: Store, now: int, cost: int, patience: int | None) -> Verdict:
        owed = max(0, state.next - now)
        if patience is None or owed <= patience:
            return Verdict(0, owed)
        return Verdict(owed - patience)

    def charged(self, state: Store, now: int, cost: int, lease: str) -> Store:
        state = self.synced(state, now)
        spend = min(Fraction(cost), state.stored)
        fresh = floor((cost - spend) * self.stable)
        return Store(state.stored - spend, state.next + self.stored_wait(state.stored, spend) + fresh)

    def refunded(self, state: Store, now: int, cost: int, lease: str) -> Store:
        if state.next <= now:
            return state
        return Store(state.stored, max(now, state.next - floor(cost * self.stable)))

    def jumped(self, state: Store, newest: int, to: int) -> Store:
        return Store(state.stored, state.next - (newest - to))

    def handed_over(self, state: Store, now: int, new: _Smooth) -> Store:
        state = self.synced(state, now)
        return Store(state.stored * new.top / self.top if self.top else Fraction(0), state.next)

    def remaining(self, state: Store, now: int) -> int:
        return 0 if state.next > now else floor(self.synced(state, now).stored)

    def reset_after(self, state: Store, now: int) -> int:
        return max(0, state.next - now)


class SmoothBursty(_Smooth):
    algorithm = "smooth_bursty"

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.top = six_places(data, "max_burst_seconds", 1, zero=True) * self.rate
        self.refill = self.stable

    def born(self, now: int) -> Store:
        return Store(Fraction(0), now)

    def stored_wait(self, stored: Fraction, spend: Fraction) -> int:
        return 0


class SmoothWarmingUp(_Smooth):
    algorithm = "smooth_warming_up"

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        warm_up = six_places(data, "warm_up") * SECOND
        factor = six_places(data, "cold_factor", 3)
        if factor < 1:
            raise ValueError(f"cold_factor must be at least 1, not {number(data['cold_factor'], 'cold_factor')}")
        cold = self.stable * factor
        self.threshold = warm_up / self.stable / 2
        self.top = self.threshold + 2 * warm_up / (self.stable + cold)
        self.slope = (cold - self.stable) / (self.top - self.threshold)
        self.refill = warm_up / self.top

    def born(self, now: int) -> Store:
        return Store(self.top, now)

    def stored_wait(self, stored: Fraction, spend: Fraction) -> int:
        above = stored - self.threshold
        wait = 0
        if above > 0:
            part = min(above, spend)
            slow = (self.stable + above * self.slope) + (self.stable + (above - part) * self.slope)
            wait = floor(part * slow / 2)
            spend -= part
        return wait + floor(self.stable * spend)
