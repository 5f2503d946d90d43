"""A process that decides on a cluster when it is told to.

`python -m tests.support.end_to_end.cluster_asker URL SEED TIMES KEY…` waits for a line.

Each request costs 1 to 3 under a limit of each key, CAPACITY at most; the answer is the sum of what was admitted.
"""

from __future__ import annotations

import sys
from random import Random

import django
from django.conf import settings
from django.test import override_settings

CAPACITY = 200


def work(seed: int, times: int, keys: list[str]) -> int:
    from ratelimits import engine
    from tests.support.engine.asking import limit, usage

    random = Random(seed)
    admitted = 0
    for _ in range(times):
        cost = random.randint(1, 3)
        limits = [limit("fixed_window", key, cost, capacity=CAPACITY, period=1_000_000) for key in keys]
        random.shuffle(limits)
        admitted += cost if engine.decide(limits, account="acme", usage=usage()).allowed else 0
    return admitted


if __name__ == "__main__":
    django.setup()
    url, seed, times, *keys = sys.argv[1:]
    options = {"CONNECTION_FACTORY": "ratelimits.django_redis_cluster.ConnectionFactory"}
    alias = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": options}
    # An answer that comes late is an answer: the processes and the nodes may share one busy core.
    with override_settings(CACHES={"ratelimits": alias}, RATELIMITS={**settings.RATELIMITS, "TIMEOUT": 30}):
        print("ready", flush=True)
        sys.stdin.readline()
        print(work(int(seed), int(times), keys), flush=True)
