"""Usage through the real engine, for the tests of the ledger wing."""

from __future__ import annotations

from decimal import Decimal

from ratelimits import engine
from ratelimits.engine.limits import TokenBucket

#: 2026-11-01, 2026-12-01 … UTC in µs: previous, current, next and next but one billing period of most tests.
PERIODS = (1790812800_000000, 1793491200_000000, 1796083200_000000, 1798761600_000000)
#: 2026-11-21T12:00Z in µs.
NOON = 1795262400_000000
#: A limit that never refuses in a test.
WIDE = TokenBucket(capacity=1_000_000_000, rate=Decimal(1_000_000_000), period=Decimal(1))


def use(
    account: str = "acme",
    key: str = "api_key:1",
    *,
    cost: int = 1,
    meter: str = "requests",
    rule: int = 1,
    version: int = 1,
    now: int | None = NOON,
    capacity: int | None = None,
) -> engine.Decision:
    """One request, decided and counted; `capacity` per hour limits it, else nothing does."""
    algorithm = WIDE if capacity is None else TokenBucket(capacity=capacity, rate=Decimal(1), period=Decimal(3600))
    usage = engine.Usage(account, key, (engine.Meter(meter, rule, version),), PERIODS)
    limit = engine.Limit(key=key, algorithm=algorithm, cost=cost, rule=rule, version=version)
    return engine.decide([limit], account=account, usage=usage, now=now)
