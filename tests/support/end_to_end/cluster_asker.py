"""Siblings (see tests.support.siblings) that make decisions on a cluster. An order is `{"times": 100, "keys": […]}`.

Each request costs 1 to 3 under one limit of CAPACITY per key. The answer is the sum of the admitted costs.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import django
from django.test import override_settings

from tests.support.siblings import obey

CAPACITY = 200


def work(seed: int, order: dict[str, Any]) -> int:
    from ratelimits import engine
    from tests.support.engine.asking import limit, usage

    random = Random(seed)
    admitted = 0
    for _ in range(order["times"]):
        cost = random.randint(1, 3)
        limits = [limit("fixed_window", key, cost, capacity=CAPACITY, period=1_000_000) for key in order["keys"]]
        random.shuffle(limits)
        admitted += cost if engine.decide(limits, account="acme", usage=usage()).allowed else 0
    return admitted


if __name__ == "__main__":
    django.setup()
    options = {"CONNECTION_FACTORY": "ratelimits.django_redis_cluster.ConnectionFactory"}
    alias = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": sys.argv[2], "OPTIONS": options}
    with override_settings(CACHES={"ratelimits": alias}):
        obey(work)
