"""A process that spends when it is told to.

`python -m tests.support.end_to_end.spender TRIALS` waits for a line; each trial is another user's.

Of each it asks for requests until one is refused, and answers with how many were admitted in each trial.
"""

from __future__ import annotations

import json
import sys

import django

#: Past it something admits without end.
MOST = 20_000


def spend(user: str) -> int:
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    identity = Identity(user)
    return next((admitted for admitted in range(MOST) if not checking.check(identity).allowed), MOST)


if __name__ == "__main__":
    django.setup()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps([spend(f"user:{trial}") for trial in range(int(sys.argv[1]))]), flush=True)
