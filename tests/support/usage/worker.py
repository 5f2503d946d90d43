"""Run child processes that make requests without end, like web workers, and are killed at any moment.

`python -m tests.support.usage.worker SEED CHILDREN` writes a line "? CHILD KEY COST" before each request, a line
"+ CHILD" (admitted) or "- CHILD" (refused) after its answer, and a line "killed CHILD" when a child is killed. The last
request of a killed child may have no answer.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import django

from tests.support.usage.background import forked


def _child(number: int, rng: random.Random) -> None:
    from redis.exceptions import RedisError

    from ratelimits import engine
    from tests.support.usage.traffic import use

    while True:
        key, cost = f"api_key:worker-{number % 4}-{rng.randrange(3)}", rng.choice((1, 1, 7, 250))
        os.write(1, f"? {number} {key} {cost}\n".encode())
        try:
            decision = use(f"worker-{number % 4}", key, cost=cost, now=None, capacity=None if rng.random() < 0.9 else 5)
        except engine.Unanswered:
            os.write(1, f"lost {number}\n".encode())
        except (engine.NotSent, RedisError):
            os.write(1, f"unsent {number}\n".encode())
        else:
            os.write(1, f"{'+' if decision.allowed else '-'} {number}\n".encode())
        if rng.random() < 0.5:
            time.sleep(0.01)


def main(seed: str, children: int) -> None:
    django.setup()
    rng = random.Random(f"{seed}:workers")
    running: list[tuple[int, int]] = []
    for number in range(10**9):
        if len(running) == children:
            time.sleep(rng.uniform(0.2, 2))
            pid, victim = running.pop(rng.randrange(children))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.write(1, f"killed {victim}\n".encode())
        running.append((forked(_child, number, seed), number))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
