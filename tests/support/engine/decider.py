"""A process that decides when it is told to.

`python -m tests.support.engine.decider SEED TIMES [FACTOR]` waits for a line.

Each request costs 1 to 3 under five limits of five algorithms at once, which hold FACTOR (1) times their
capacities; the answer is the sum of what was admitted.
"""

from __future__ import annotations

import sys
from random import Random

import django
from django.conf import settings
from django.test import override_settings

#: What each limit holds; the least of them is what all together admit.
CAPACITIES = {"token_bucket": 700, "fixed_window": 800, "sliding_window": 600, "sliding_log": 900, "concurrency": 500}


def work(seed: int, times: int, factor: int) -> int:
    from ratelimits.engine import Limit, algorithm_from_json, decide

    random = Random(seed)
    numbers = {"rate": 1, "period": 1_000_000, "lease_ttl": 1_000_000, "window_start": "first_hit"}
    algorithms = [
        algorithm_from_json({"algorithm": name, "capacity": capacity * factor, **numbers})
        for name, capacity in CAPACITIES.items()
    ]
    admitted = 0
    for _ in range(times):
        cost = random.randint(1, 3)
        limits = [Limit(f"user:{number % 2}", one, one.id, cost) for number, one in enumerate(algorithms)]
        random.shuffle(limits)
        admitted += cost if decide(limits).allowed else 0
    return admitted


if __name__ == "__main__":
    django.setup()
    seed, times, factor = (*map(int, sys.argv[1:]), 1)[:3]
    # An answer that comes late is an answer: eight processes may share one busy core.
    with override_settings(RATELIMITS={**settings.RATELIMITS, "TIMEOUT": 30}):
        print("ready", flush=True)
        sys.stdin.readline()
        print(work(seed, times, factor), flush=True)
