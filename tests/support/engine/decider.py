"""Siblings (see tests.support.siblings) that make decisions. An order is `{"times": 100, "factor": 6}`.

Each request costs 1 to 3, under five limits of five algorithms at once. Each limit has `factor` times its capacity. The
answer is the sum of the admitted costs.
"""

from __future__ import annotations

from random import Random
from typing import Any

import django

from tests.support.siblings import obey

#: The capacities of the limits. Together the limits admit the smallest capacity.
CAPACITIES = {"token_bucket": 700, "fixed_window": 800, "sliding_window": 600, "sliding_log": 900, "concurrency": 500}
#: How many orders of the limits occur. Each has a script of its own, which each process assembles.
ORDERS = 12


def work(seed: int, order: dict[str, Any]) -> int:
    from ratelimits.engine import Limit, algorithm_from_json, decide

    random = Random(seed)
    numbers = {"rate": 1, "period": 1_000_000, "lease_ttl": 1_000_000, "window_start": "first_hit"}
    algorithms = [
        algorithm_from_json({"algorithm": name, "capacity": capacity * order["factor"], **numbers})
        for name, capacity in CAPACITIES.items()
    ]
    orders = [random.sample(range(len(algorithms)), len(algorithms)) for _ in range(ORDERS)]
    admitted = 0
    for _ in range(order["times"]):
        cost = random.randint(1, 3)
        limits = [Limit(f"user:{number % 2}", one, one.id, cost) for number, one in enumerate(algorithms)]
        admitted += cost if decide([limits[place] for place in random.choice(orders)]).allowed else 0
    return admitted


if __name__ == "__main__":
    django.setup()
    obey(work)
