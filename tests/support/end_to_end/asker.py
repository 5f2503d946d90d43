"""Siblings (see tests.support.siblings) that make requests to the time API.

The order `{"secret": "…", "times": 400}` asks for 400 requests with one API key. The answer has the number of each
status, and for each request when it began (by the system's monotonic clock) and under which policy.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import django
from django.urls import get_resolver

from tests.support.siblings import obey


def request(_number: int, order: dict[str, Any]) -> dict[str, Any]:
    from django.test import Client

    client = Client()
    headers = {"Authorization": f"Api-Key {order['secret']}"}
    statuses: Counter[int] = Counter()
    policies = []
    for _ in range(order["times"]):
        begun = time.monotonic()
        response = client.get("/api/time/", headers=headers)
        statuses[response.status_code] += 1
        policies.append((begun, response["RateLimit-Policy"]))
    return {"statuses": statuses, "policies": policies}


if __name__ == "__main__":
    django.setup()
    assert get_resolver().url_patterns  # Import the views once for all requests.
    obey(request)
