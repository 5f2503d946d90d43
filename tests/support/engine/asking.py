"""Short functions to make decisions, and to read the keys that the engine stored on the server."""

from __future__ import annotations

from typing import Any

from ratelimits.conf import conf
from ratelimits.engine import Decision, Limit, Meter, Usage, algorithm_from_json, decide
from ratelimits.engine.keys import Keyspace, shard_of
from tests.support.raw import RawRedis

#: 2027-01-15T08:00Z in µs.
NOW = 1_800_000_000_000_000
SECOND = 1_000_000
DAY = 86_400 * SECOND
#: The namespace of tests.settings.
KEYS = Keyspace("test", conf.SHARDS)
#: Starts of the months December 2026 to March 2027, UTC.
MONTHS = (1_796_083_200 * SECOND, 1_798_761_600 * SECOND, 1_801_440_000 * SECOND, 1_803_859_200 * SECOND)


def limit(algorithm: str = "token_bucket", /, key: str = "user:1", cost: int = 1, **more: Any) -> Limit:
    """Return a limit of one key; arguments that `Limit` does not have go to the algorithm."""
    own = {name: more.pop(name) for name in ("name", "mode", "rule", "version", "since") if name in more}
    numbers = {"capacity": 10, "rate": 1, "period": 1, "lease_ttl": 60, "calendar_unit": "month", **more}
    taken = {name: value for name, value in numbers.items() if value is not None}
    return Limit(key, algorithm_from_json({"algorithm": algorithm, **taken}), cost=cost, **own)


def ask(*limits: Limit, now: int | None = NOW, **more: Any) -> Decision:
    """Decide at a given moment."""
    return decide(limits, now=now, **more)


def usage(*meters: str | Meter, account: str = "acme", key: str = "user:1") -> Usage:
    """Return a Usage: how a request is counted and billed."""
    named = tuple(Meter(meter) if isinstance(meter, str) else meter for meter in meters or ("requests",))
    return Usage(account, key, named)


def counted(client: RawRedis, account: str = "acme") -> dict[str, int]:
    """Return the counters of an account's open batch, by field."""
    fields = client.hgetall(KEYS.open(home(account)))
    return {name.decode(): int(value) for name, value in fields.items() if not name.startswith(b"#")}


def home(account: str) -> int:
    """Return the shard of an account."""
    return shard_of(f"account:{account}", KEYS.shards)


def everything(client: RawRedis) -> dict[bytes, bytes]:
    """Return all keys of the database with their values, as the server dumps them."""
    return {key: client.dump(key) for key in sorted(client.keys("*"))}
