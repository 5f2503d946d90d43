"""A process that makes requests when it is told to: each line of JSON on its input is answered by one.

`{"secret": "…", "times": 400}` is that many requests to the time API with one API key; the answer counts the
statuses, and says of each request when it was begun (by the system's monotonic clock) and under which policy.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import django

if __name__ == "__main__":
    django.setup()
    from django.test import Client

    client = Client()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        headers = {"Authorization": f"Api-Key {order['secret']}"}
        statuses: Counter[int] = Counter()
        policies = []
        for _ in range(order["times"]):
            begun = time.monotonic()
            response = client.get("/api/time/", headers=headers)
            statuses[response.status_code] += 1
            policies.append((begun, response["RateLimit-Policy"]))
        print(json.dumps({"statuses": statuses, "policies": policies}), flush=True)
