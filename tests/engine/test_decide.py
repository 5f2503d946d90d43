"""Limits to decision, on the real scripts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from ratelimits.engine import peek
from ratelimits.engine.limits import LeakyBucket, SmoothWarmingUp
from tests.engine.asking import NOW, SECOND, ask, limit


class TestChangedRates:
    """What is spent stays spent, in permits, whatever the old and the new rate are."""

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"rate": 1, "period": 1}, {"rate": 3, "period": 7}),
            ({"rate": "0.9", "period": 1}, {"rate": "33.333333", "period": 86_400}),
            # Numerators and denominators beyond 2**53.
            ({"rate": "27737203.145318", "period": "3394804.024435"}, {"rate": "0.004729", "period": "1933.625891"}),
            ({"rate": "14.304068", "period": "0.002461"}, {"rate": "9758489.313253", "period": "68787.062178"}),
            ({"rate": "0.333333", "period": 86_400}, {"rate": "7654321.123457", "period": 2_678_400}),
        ],
    )
    def test_a_bucket_keeps_its_debt(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        old, new = limit("leaky_bucket", cost=7, **before), limit("leaky_bucket", **after)
        ask(old)
        told = peek([new], now=NOW)
        assert isinstance(new.algorithm, LeakyBucket)
        debt = 7 * new.algorithm.interval
        assert debt <= told.reply[5] <= debt + 1 + debt / 2**51
        assert told.remaining == 3

    def test_stored_permits_are_scaled_by_the_new_maximum(self) -> None:
        old = limit("smooth_warming_up", rate=5, warm_up=206, cold_factor="11.805618", cost=300)
        new = limit("smooth_warming_up", rate=5, warm_up="115231.559753", cold_factor="1.020001")
        ask(old)
        told = peek([old], now=NOW + 1000 * SECOND), peek([new], now=NOW)
        stored = _most(old.algorithm) - 300
        assert isinstance(old.algorithm, SmoothWarmingUp)
        assert told[0].remaining == int(_most(old.algorithm))
        owed = Fraction(told[1].reply[5])
        assert owed > 0
        later = peek([new], now=NOW + told[1].reply[5])
        assert later.remaining == int(stored * _most(new.algorithm) / _most(old.algorithm))


def _most(algorithm: Any) -> Fraction:
    """Guava's maxPermits."""
    cold, interval = Fraction(algorithm.cold_factor), algorithm.interval / SECOND
    threshold = Fraction(algorithm.warm_up) / 2 / interval
    return threshold + 2 * Fraction(algorithm.warm_up) / (interval * (1 + cold))
