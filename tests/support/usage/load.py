"""Make requests from several threads, and count their answers: acknowledged, refused, or unanswered."""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import partial

from django.db.models import Sum
from redis.exceptions import RedisError

from ratelimits import engine
from ratelimits.usage.models import Line
from tests.support.usage.background import Background
from tests.support.usage.traffic import use

_PAUSE = 0.002


class Load(Background):
    """Make requests until the block is left. Count units by key: `acknowledged`, `denied`, `unanswered`."""

    def __init__(self, seed: int, threads: int = 3, label: str = "") -> None:
        self._label = label
        self.acknowledged: Counter[str] = Counter()
        self.denied: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        super().__init__(*(partial(self._run, number, random.Random(f"{seed}:{number}")) for number in range(threads)))

    def _run(self, number: int, rng: random.Random) -> None:
        while not self._end.is_set():
            # Each thread has its own keys, so that its counts need no lock.
            key, cost = f"api_key:{self._label}{number}-{rng.randrange(5)}", rng.choice((1, 1, 1, 7, 250))
            account = f"account-{number}-{rng.randrange(3)}"
            try:
                decision = use(account, key, cost=cost, now=None, capacity=None if rng.random() < 0.9 else 5)
            except engine.Unanswered:
                self.unanswered[key] += cost
            except (engine.NotSent, RedisError):
                pass
            else:
                (self.acknowledged if decision.allowed else self.denied)[key] += cost
            time.sleep(_PAUSE)

    def missing(self, *, at_most: bool = False) -> int:
        """Return the number of acknowledged units that the ledger does not have.

        With `at_most`, also check that the ledger has at most the acknowledged and the unanswered units.
        """
        sums = Line.objects.values("key").annotate(admitted=Sum("admitted_units"))
        ledger = {row["key"]: row["admitted"] for row in sums.order_by()}
        keys = self.acknowledged.keys() | self.unanswered.keys()
        for key in keys if at_most else ():
            assert ledger.get(key, 0) <= self.acknowledged[key] + self.unanswered[key], key
        return sum(max(self.acknowledged[key] - ledger.get(key, 0), 0) for key in keys)

    def check(self) -> None:
        """Check for every key, admitted and denied: acknowledged ≤ ledger ≤ acknowledged + unanswered."""
        sums = Line.objects.values("key").annotate(admitted=Sum("admitted_units"), denied=Sum("denied_units"))
        ledger = {row["key"]: row for row in sums.order_by()}
        assert ledger.keys() <= self.acknowledged.keys() | self.denied.keys() | self.unanswered.keys()
        for key in self.acknowledged.keys() | self.denied.keys() | self.unanswered.keys():
            row = ledger.get(key, {"admitted": 0, "denied": 0})
            answers = f"{key}: {self.acknowledged[key]} acknowledged, {self.denied[key]} denied"
            assert row["admitted"] >= self.acknowledged[key], answers
            assert row["denied"] >= self.denied[key], answers
            most = self.acknowledged[key] + self.denied[key] + self.unanswered[key]
            assert row["admitted"] + row["denied"] <= most, answers

    def __str__(self) -> str:
        counts = (sum(c.values()) for c in (self.acknowledged, self.denied, self.unanswered))
        return "acknowledged {} units, denied {}, unanswered {}".format(*counts)
