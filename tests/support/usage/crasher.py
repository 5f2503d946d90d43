"""Run child processes that seal and drain without end, and die between any two steps.

`python -m tests.support.usage.crasher SEED CHILDREN` writes a line for each crash, "kill <point>" or "cut <point>": a
child kills itself with SIGKILL, or loses its database connection in the middle of a transaction. It writes "met" for
each batch that another child was draining, or had drained meanwhile.
"""

from __future__ import annotations

import os
import random
import sys
import time

import django
from django.db import Error as DatabaseError
from django.db import connection

from tests.support.usage.dying import die_at, keep_children

#: Compaction joins the batches of a span of this many µs. It is short, so that batches are joined during the test.
SPAN = 300_000


def _child(number: int, rng: random.Random) -> None:
    from redis.exceptions import RedisError

    from ratelimits.usage.ledger import crash
    from ratelimits.usage.ledger.apply import BatchOutcome
    from ratelimits.usage.ledger.drain import drain
    from ratelimits.usage.ledger.fence import NotFencedError
    from ratelimits.usage.ledger.retention import compact
    from ratelimits.usage.ledger.seal import seal
    from ratelimits.usage.ledger.tally import tally

    die_at(crash.STEPS[number % len(crash.STEPS)], rng.randrange(4), rng)
    compact.SPAN = SPAN
    while True:
        try:
            seal()
            outcomes = drain().outcomes
            os.write(1, b"met\n" * (outcomes[BatchOutcome.BUSY] + outcomes[BatchOutcome.DONE_BEFORE]))
            tally()
            list(compact.compact())
        except (RedisError, NotFencedError):
            time.sleep(0.02)
        except DatabaseError:
            connection.close()
        time.sleep(rng.random() * 0.05)


def main(seed: str, children: int) -> None:
    django.setup()
    keep_children(_child, seed, children)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
