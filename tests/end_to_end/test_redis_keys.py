"""Test that each Redis key of the app has a time to live or an owner that deletes it, as docs/architecture.md says."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis

from ratelimits import engine, rules
from ratelimits.algorithms.limits import Concurrency, SlidingLog
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.call import Op
from ratelimits.engine.server import current_server
from ratelimits.quota import checking, spending
from ratelimits.simulate import Replay, Simulator, TraceLine, clean, read_rules
from tests.end_to_end.test_topologies import WHO, everything, using
from tests.support.entry_points import begin_afresh
from tests.support.eventually import until
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.servers import server_binary
from tests.support.usage.traffic import flow

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
LONG = Decimal(1_000_000)
#: What a name in `<…>` stands for in the table; for the names that are not here, any text without a colon.
_NAMES = {
    "key": ".+",
    "state": ".+",
    "name": ".+",
    "id": "[0-9a-f]+",
    "schema": r"\d+",
    "namespace": "test",
    "shard": r"\d+",
    "algorithm": "[a-z]",
}
#: A Redis key by which this test learns that it has seen all earlier events.
_END = "seen"


@dataclass(frozen=True)
class Pattern:
    """A row of the table."""

    text: str
    lives: bool
    owner: str

    @property
    def regex(self) -> re.Pattern[str]:
        parts = re.split(r"<(\w+)>", self.text.replace("…", "rl:<schema>:<namespace>:{<shard>}:"))
        parts[::2] = map(re.escape, parts[::2])
        parts[1::2] = (_NAMES.get(name, "[^:]+") for name in parts[1::2])
        return re.compile("".join(parts))


def table() -> list[Pattern]:
    rows = re.findall(r"^\| `(…?\S+)` \| [^|]+ \| (yes|no) \|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    return [Pattern(text, lives == "yes", owner.strip()) for text, lives, owner in rows]


def pattern_of(key: str) -> Pattern | None:
    """Return the pattern of a key. If several fit, the one with the most text of its own is meant."""
    fitting = [row for row in table() if row.regex.fullmatch(key)]
    return max(fitting, key=lambda row: len(re.sub("<.*?>", "", row.text)), default=None)


@contextmanager
def watched(port: int) -> Iterator[dict[str, bool]]:
    """Collect all keys that are written inside the block, each with whether it always had a time to live.

    The server reports each write. A script is one step, so after it the key has the time to live that it should have.
    """
    seen: dict[str, bool] = {}

    def watch() -> None:
        for message in events.listen():
            if message["type"] != "pmessage" or message["channel"].endswith((b":del", b":expired")):
                continue
            key = message["data"].decode()
            if key == _END:
                return
            seen[key] = seen.get(key, True) and client.pttl(key) != -1

    with redis.Redis(port=port) as client, client.pubsub() as events:
        client.config_set("notify-keyspace-events", "EA")
        events.psubscribe("__keyevent@0__:*")
        until(lambda: client.pubsub_numpat() == 1, "the events are watched")
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield seen
        finally:
            client.set(_END, "")
            thread.join(30)
            client.delete(_END)
        assert not thread.is_alive()


def rarer() -> None:
    """Write the Redis keys that `everything` does not write."""
    rule("ahead", "fixed_window", scope="ahead", capacity=5000, period=LONG, prefetch=50)
    assert all(checking.check(WHO, "ahead").allowed for _ in range(60))
    spending.send_and_give_back(everything=True)
    rule("monthly", "calendar_window", capacity=100)
    assert checking.check(WHO).allowed
    # A log of so many charges that it has a tree, and leases with several permits.
    log = engine.Limit("user:1", SlidingLog(1_000, LONG))
    assert all(engine.decide([log]).allowed for _ in range(200))
    engine.decide([engine.Limit("user:1", Concurrency(10, LONG), cost=3, name="many")], lease="several")


def simulate() -> None:
    """Simulate, then leave a simulation as a killed process does, and let another one clean."""
    wire = current_server().wire
    log = {"algorithm": "sliding_log", "capacity": 100_000, "period": 60}
    leases = {"algorithm": "concurrency", "capacity": 50, "lease_ttl": 60}
    bucket = {"algorithm": "token_bucket", "capacity": 50, "rate": 1, "period": 1}
    left = Simulator(wire)
    for simulated in (log, leases, bucket):
        replay = Replay(read_rules(simulated), f"{simulated['algorithm']}:")
        lines = ((replay, TraceLine(n, n, Op.TRY, "key", 30, 0, str(n))) for n in range(200))
        assert len(list(left.run(lines))) == 200
    client: Any = wire.client
    assert clean(wire) == 0
    (proof,) = client.scan_iter("rl:1:simulate-*:alive")
    client.delete(proof)
    assert clean(wire) == 1
    left.close()


@pytest.fixture(params=["valkey", "redis6"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    running = EmbeddedServer(
        tmp_path / "s", aof=True, binary=server_binary(request.param), options={"appendfsync": "always"}
    )
    yield running
    current_server().wire.client.close()
    running.stop()
    rules.forget()


def test_every_redis_key_has_a_time_to_live_or_an_owner(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_afresh(monkeypatch)
    with using(server.url):
        with watched(server.port) as seen:
            everything()
            rarer()
            simulate()
            flow()
            assert [one.findings for one in diagnose()] == [()]
        patterns = {key: pattern_of(key) for key in seen}
        assert [key for key, pattern in patterns.items() if pattern is None] == []
        for key, pattern in patterns.items():
            assert pattern is not None
            assert seen[key] or not pattern.lives, f"{key} had no time to live at some moment"
            assert pattern.lives == (pattern.owner == ""), f"{pattern.text}: a time to live, or else an owner"
        assert {row.text for row in table()} - {pattern.text for pattern in patterns.values() if pattern} == set()
        # The owners do what the table says: of what has no time to live, only the fixed keys of the shards are left.
        flow()
        client: RawRedis = redis.Redis(port=server.port)
        left = {key.decode() for key in client.scan_iter() if client.pttl(key) == -1}
        assert {re.sub(".*}", "", key) for key in left} <= {":head", ":meta", ":receipts"}
        fields = {len(client.hkeys(key)) for key in client.scan_iter("*}:meta")}
        assert max(fields) <= 13  # those that lua/batch.lua lists
        client.close()
