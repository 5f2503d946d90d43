"""A Celery app with a task that makes requests of one user.

Start it with `celery -A tests.support.end_to_end.stopping_tasks worker`.
"""

from __future__ import annotations

import redis
from django.conf import settings

from project.celery import app


@app.task(name="tests.ask", ignore_result=True)
def ask(user: str, times: int) -> None:
    """Make this number of requests, then add an entry to the broker's list "asked"."""
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    for _ in range(times):
        checking.check(Identity(user, account="account:acme"))
    with redis.Redis.from_url(settings.CELERY_BROKER_URL) as client:
        client.rpush("asked", user)
