"""A Celery app for tests/runtimes. Start it with `celery -A tests.support.runtimes.tasks worker`.

The module decides a request when it is imported, so before Celery forks its children.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import django
import redis
from django.conf import settings

from project.celery import app

django.setup()

from ratelimits.identity import Identity  # noqa: E402
from ratelimits.quota import checking, finishing  # noqa: E402

assert checking.check(Identity("user:loading", account="account:loading"), "loading").allowed


@app.task(name="tests.ask", ignore_result=True)
def ask(scope: str) -> None:
    """Add to the broker's list "answers" whether a request is allowed, and the process. Without a scope make none."""
    answer = json.dumps([not scope or checking.check(Identity("user:7"), scope).allowed, os.getpid()])
    with redis.Redis.from_url(settings.CELERY_BROKER_URL) as client:
        client.rpush("answers", answer)


@app.task(name="tests.hold", ignore_result=True)
def hold() -> None:
    """Take a lease, make the file HELD, and keep the lease until the file RELEASE exists."""
    answer = checking.check(Identity("user:7"), "hold")
    Path(os.environ["HELD"]).touch()
    while not Path(os.environ["RELEASE"]).exists():
        time.sleep(0.01)
    assert answer.decision is not None
    assert answer.decision.receipt is not None
    finishing.end_leases(answer.decision.receipt)
