"""Run child processes that close and push without end, and die between any two steps.

`python -m tests.support.reports.pusher SEED CHILDREN START` writes a line for each crash, "kill <point>" or "cut
<point>": a child kills itself with SIGKILL, or loses its database connection in the middle of a transaction. START is
the real time, in seconds since 1970 UTC, at which the tests' clock showed NOW.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from datetime import datetime, timedelta

import django
from django.db import Error as DatabaseError
from django.db import connection

from tests.support.usage.dying import die_at, keep_children

#: After these seconds a child that did not reach its point is replaced by a child with another point.
LONGEST = 20.0


def clock(start: float) -> datetime:
    """Return the time for pushers and receivers. At the real time `start` it was NOW."""
    from tests.billing.push.conftest import NOW

    return NOW + timedelta(seconds=time.time() - start)


def impatient() -> None:
    """Make claims and pauses very short, so that they end during the test."""
    from ratelimits.billing.push import deliveries

    deliveries.CLAIM = timedelta(seconds=1)
    deliveries.FIRST_PAUSE, deliveries.MAX_PAUSE = timedelta(seconds=0.02), timedelta(seconds=0.1)


def work(now: datetime, rng: random.Random) -> None:
    """Close what can be closed, and push it to every receiver, one after the other."""
    from ratelimits.billing.push.deliveries import plan, send
    from ratelimits.billing.push.receivers import receivers
    from ratelimits.billing.reports.closing.close import finalise

    finalise(int(now.timestamp()) * 1_000_000)
    everybody = receivers()
    for each in rng.sample(everybody, len(everybody)):
        plan(each, now)
        send(each, now)


def _child(number: int, rng: random.Random) -> None:
    from ratelimits.usage.ledger import crash

    points = (*crash.CLOSE_STEPS, *crash.PUSH_STEPS)
    die_at(points[number % len(points)], rng.randrange(2), rng)
    impatient()
    logging.disable()  # Do not log accounts and reports that fail because the database connection is cut.
    end, start = time.monotonic() + LONGEST, float(sys.argv[3])
    while time.monotonic() < end:
        try:
            work(clock(start), rng)
        except DatabaseError:
            connection.close()
        time.sleep(rng.random() * 0.02)


def main(seed: str, children: int) -> None:
    django.setup()
    keep_children(_child, seed, children)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
