"""Siblings (see tests.support.siblings) that spend permits. An order is a number of trials, each for another user.

In each trial a sibling makes requests until one is refused. Then it does what a process does when it stops. It answers
with the number of admitted requests of each trial.
"""

from __future__ import annotations

import django

from tests.support.siblings import obey

#: If this many are admitted, there is no limit.
MOST = 20_000


def spend(user: str) -> int:
    from ratelimits import background
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    identity = Identity(user, None, "account:acme")
    admitted = next((number for number in range(MOST) if not checking.check(identity).allowed), MOST)
    background.end()
    return admitted


if __name__ == "__main__":
    django.setup()
    obey(lambda _number, trials: [spend(f"user:{trial}") for trial in range(trials)])
