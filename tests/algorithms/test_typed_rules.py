from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from ratelimits.algorithms.typed_rules import with_numbers


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ({"algorithm": "gcra", "rate": "10/5min"}, {"capacity": 10, "rate": Decimal(10), "period": Decimal(300)}),
        (
            {"algorithm": "gcra", "rate": "0.5/s", "capacity": 2},
            {"capacity": 2, "rate": Decimal("0.5"), "period": Decimal(1)},
        ),
        ({"algorithm": "fixed_window", "rate": "5/h"}, {"capacity": 5, "period": Decimal(3600)}),
        ({"algorithm": "smooth_bursty", "rate": "5/s"}, {"rate": Decimal(5), "period": Decimal(1)}),
    ],
)
def test_a_typed_rate_becomes_the_numbers_that_the_algorithm_has(
    values: dict[str, Any], numbers: dict[str, Any]
) -> None:
    assert with_numbers(values) == {"algorithm": values["algorithm"], **numbers}


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "gcra", "rate": 5, "period": 1},
        {"algorithm": "concurrency", "rate": "10/s"},
        {"algorithm": "no such", "rate": "10/s"},
        {"rate": "10/s"},
        {"algorithm": "gcra", "rate": "fast"},
        {"algorithm": ["gcra"], "rate": "10/s"},
    ],
)
def test_other_values_stay_for_those_who_check_them(values: dict[str, Any]) -> None:
    assert with_numbers(values) == values


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"algorithm": "gcra", "rate": "10/minuet"}, "is not a rate"),
        ({"algorithm": "gcra", "rate": "10/min", "period": 1}, "another period"),
        ({"algorithm": "gcra", "rate": "10/min", "period": "soon"}, "is not a length of time"),
        ({"algorithm": "gcra", "rate": "0.5/s"}, "not a whole number"),
        ({"algorithm": "fixed_window", "rate": "1e99/s", "capacity": 5}, "another capacity"),
    ],
)
def test_a_rate_that_contradicts_another_field_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_numbers(values)
