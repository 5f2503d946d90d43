"""Siblings that spend: each order is a number of trials, each of another user's permits.

Of each it asks for requests until one is refused, and answers with how many were admitted in each trial.
"""

from __future__ import annotations

import django

from tests.support.siblings import obey

#: Past it something admits without end.
MOST = 20_000


def spend(user: str) -> int:
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    identity = Identity(user)
    return next((admitted for admitted in range(MOST) if not checking.check(identity).allowed), MOST)


if __name__ == "__main__":
    django.setup()
    obey(lambda _number, trials: [spend(f"user:{trial}") for trial in range(trials)])
