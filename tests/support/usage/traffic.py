"""Make usage through the real engine, for the tests of the ledger and of reports."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from ratelimits import engine
from ratelimits.algorithms.limits import TokenBucket
from ratelimits.engine.server import current_server
from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.drain import DrainResult, drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import ShardState
from tests.support.eventually import until

#: A capacity that never refuses in a test.
WIDE = TokenBucket(capacity=1_000_000_000, rate=Decimal(1_000_000_000), period=Decimal(1))


def at(text: str) -> int:
    """Return the µs since 1970 UTC of a time like "2026-11-21T12:00" (UTC if it has no offset)."""
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * 1_000_000


NOON = at("2026-11-21T12:00")


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
    configuration: int = 0,
) -> engine.Decision:
    """Decide and count one request, limited by `capacity` per hour if given.

    `configuration` is the version of the rules in force, where there are rules.
    """
    algorithm = WIDE if capacity is None else TokenBucket(capacity=capacity, rate=Decimal(1), period=Decimal(3600))
    usage = engine.Usage(account, key, (engine.Meter(meter, rule, version),))
    limit = engine.Limit(key=key, algorithm=algorithm, cost=cost, rule=rule, version=max(version, configuration))
    return engine.decide([limit], account=account, usage=usage, now=now)


def opened_late() -> None:
    """Let no open batch begin before its shard's watermark, as on a real server. Earlier usage then counts as late."""
    server = current_server()
    for state in ShardState.objects.filter(watermark__gt=0):
        client, open_batch = server.wire.client_of(server.keyspace, state.shard), server.keyspace.open(state.shard)
        opened: Any = client.hget(open_batch, "#o")
        if opened is not None and int(opened) < state.watermark:
            client.hset(open_batch, "#o", str(state.watermark))


def flow() -> DrainResult:
    """Bring usage from Redis to the ledger and its totals, with a clock that is later than all times in tests."""
    seal()
    drained = drain(at("2100-01-01"))
    tally()
    return drained


def flow_after_kills() -> None:
    """Bring usage to the ledger and its totals although the database can still hold locks of killed processes.

    PostgreSQL ends the session of a killed process only when it notices. Until then a drain leaves the shard to it.
    """
    seal()
    until(lambda: BatchOutcome.BUSY not in drain().outcomes, "no killed process has a shard's lock any more")
    tally()
