"""Run child processes that work without end, and are killed or lose the database at a point between two steps."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

from django.db import connection

from ratelimits.usage.ledger import crash
from tests.support.usage.background import forked


def die_at(target: str, passes: int, rng: random.Random) -> None:
    """Kill this process when it reaches a point for the `passes`-th time. In a transaction, cut the database instead.

    Write the line "kill <point>" or "cut <point>" to the standard output.
    """

    def reached(point: str) -> None:
        nonlocal passes
        if point != target:
            return
        passes -= 1
        if passes >= 0:
            return
        if connection.in_atomic_block and rng.random() < 0.4:
            os.write(1, f"cut {point}\n".encode())
            _lose_the_database()
        else:
            os.write(1, f"kill {point}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    crash.reached = reached


def _lose_the_database() -> None:
    """Close the database connection in the middle of the work."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    else:
        connection.connection.close()


def keep_children(child: Callable[[int, random.Random], None], seed: str, children: int) -> None:
    """Fork child processes, and a new one for each that ends; never return.

    Each gets a number and a random generator.
    """
    running: set[int] = set()
    for number in range(10**9):
        while len(running) >= children:
            running.discard(os.wait()[0])
        running.add(forked(child, number, seed))
