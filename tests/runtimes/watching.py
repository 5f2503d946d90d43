"""Look at the processes of a runtime from outside: their connections, and what they have counted."""

from __future__ import annotations

from collections import Counter

import psutil
import redis
from django.db.models import Sum

from ratelimits.usage.models import ProcessTotal

#: The account whose requests are made when the application is imported.
LOADING = "loading"


def connections(pid: int, port: int) -> Counter[int]:
    """Return the connections of a process and its descendants to this port: by local port, how many processes have it.

    A connection that a process inherited by a fork is in the list of both.
    """
    found: Counter[int] = Counter()
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        try:
            sockets = one.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        found.update({each.laddr.port for each in sockets if getattr(each.raddr, "port", None) == port})
    return found


def refusals(client: redis.Redis) -> int:
    """Return how many requests the open batches count as denied."""
    fields = (item for key in client.keys("rl:*:open") for item in client.hgetall(key).items())
    return sum(int(value) for name, value in fields if name[:2] == b"d|" and name[-2:] in (b"|1", b"|n"))


def admissions() -> int:
    """Return how many admitted requests the totals of all processes have, without those made at an import."""
    totals = ProcessTotal.objects.filter(kind="admitted").exclude(account__contains=LOADING)
    found: int | None = totals.aggregate(sum=Sum("requests"))["sum"]
    return found or 0
