"""Run child processes that tally, close and move account texts without end, and die between any two steps.

`python -m tests.support.usage.mover SEED CHILDREN` writes a line for each crash, "kill <point>" or "cut <point>": a
child kills itself with SIGKILL, or loses its database connection in the middle of a transaction.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from datetime import UTC, datetime

import django
from django.db import Error as DatabaseError
from django.db import connection

from tests.support.usage.dying import die_at, keep_children

TEXTS = ("acme", "bolt", "cord", "dune")
#: The first and the last quarter of an hour with usage, and the moment at which periods are closed (s since 1970 UTC).
FIRST, LAST, CLOSED_AT = (
    int(datetime(2026, month, day, tzinfo=UTC).timestamp()) for month, day in ((10, 1), (11, 20), (11, 3))
)
#: Maximum number of customers: further moves go to customers who exist.
MAX_CUSTOMERS = 12


def quarter(rng: random.Random) -> int:
    """Return a random quarter of an hour (s since 1970 UTC)."""
    return rng.randrange(FIRST, LAST, 900)


def work(rng: random.Random) -> None:
    """Tally, then perhaps close what can be closed, then move a text to some customer."""
    from django.contrib.auth.models import User

    from ratelimits.billing.reports.closing.close import finalise
    from ratelimits.models import Customer
    from ratelimits.usage.customers.move import NotMovedError, move
    from ratelimits.usage.ledger.tally import tally

    tally()
    if rng.random() < 0.3:
        finalise(CLOSED_AT * 1_000_000)
    customers = list(Customer.objects.order_by("pk")[:MAX_CUSTOMERS])
    customer = None if len(customers) < MAX_CUSTOMERS and rng.random() < 0.3 else rng.choice(customers)
    by = User.objects.get() if rng.random() < 0.7 else None
    try:
        # Each move has a reason of its own, by which the test finds its adjustments.
        move(rng.choice(TEXTS), customer, quarter(rng), by=by, reason=f"move {rng.getrandbits(60)}")
    except NotMovedError:
        return


def _child(number: int, rng: random.Random) -> None:
    from ratelimits.usage.ledger import crash

    points = (*crash.MOVE_STEPS, *crash.TALLY_STEPS, *crash.CLOSE_STEPS)
    die_at(points[number % len(points)], rng.randrange(2), rng)
    logging.disable()  # Do not log accounts and shards that fail because the database connection is cut.
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            work(rng)
        except DatabaseError:
            connection.close()
        time.sleep(rng.random() * 0.02)


def main(seed: str, children: int) -> None:
    django.setup()
    keep_children(_child, seed, children)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
