"""Test that each script call has a maximum number of entries: the server does nothing else while it runs a script."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import ratelimits
from ratelimits.engine import counting
from ratelimits.engine.assemble import scripts
from ratelimits.engine.call import Meter, Usage
from ratelimits.engine.counting import RefusalCount, in_bounds
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.engine.server import current_server
from ratelimits.quota.costs import MAX_METERS
from ratelimits.quota.deny_cache import send
from ratelimits.usage.ledger.pending import BATCHES_PER_PASS
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.entry_points import counted
from tests.support.raw import RawRedis

APP = Path(ratelimits.__file__).parent
#: The number of counters at which a script seals the open batch (lua/counting/usage_new.lua).
BATCH = 1000
#: Every script that the app sends, by its last file: what its entries are, and their maximum number. The deciding
#: script is assembled from its template; the other scripts are read.
BOUNDS = {
    "decide": ("limits, each with its cost in one of the meters of the request", MAX_LIMITS + MAX_METERS),
    "counting/count": ("counters of refusals", counting.MAX_COUNTERS),
    "counting/spent": ("counters of prefetches", counting.MAX_SPENT_COUNTERS),
    "seal": ("counters of the open batch: those of a full one and of the call that fills it", BATCH + 2 * MAX_LIMITS),
    "pending": ("names of batches", BATCHES_PER_PASS),
    "publish": ("heads", 1),
    "drop": ("batches", 1),
}
#: Files that are only parts of the scripts above.
PARTS = {
    *("batch", "heads", "lasting", "numbers", "records", "rules", "run"),
    *(
        "memory/full",
        "doctor/expire",
        "counting/shard_run",
        "counting/usage",
        "counting/usage_new",
        "counting/usage_of_rule",
    ),
}


def sent() -> set[str]:
    """Return the last file of each script that the code reads, and "decide"."""
    found = {"decide"}
    for path in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "scripts.read":
                # The doctor gets the names of scripts that the app also sends.
                found.update(str(arg.value) for arg in node.args[-1:] if isinstance(arg, ast.Constant))
    return found


def test_each_script_has_a_bound() -> None:
    assert sent() == BOUNDS.keys()
    files = {str(path.relative_to(APP / "lua").with_suffix("")) for path in (APP / "lua").rglob("*.lua")}
    assert {name for name in files if not name.startswith("algorithms/")} == BOUNDS.keys() | PARTS
    # benchmarks/bounded.py measures each script at its bound.
    assert all(bound <= 150 for name, (_what, bound) in BOUNDS.items() if name != "seal")


def test_the_benchmark_measures_each_script_at_its_bound() -> None:
    measured = json.loads((APP.parent / "docs/performance/bounded.json").read_text())["kinds"]["scripts"]
    # A seal is measured with a nearly full batch, because the call that fills a batch seals it.
    entries = {name: "990" if name == "seal" else str(bound) for name, (_what, bound) in BOUNDS.items()}
    assert {tuple(name.split()[:2]) for name in measured if "waiting" not in name} == {
        (f"{name},", number) for name, number in entries.items()
    }
    # What a process kept during an outage is sent in many calls, so that no call is long.
    assert "counting/count, 50000 waiting counts" in measured
    # A decision of the maximum number of limits takes longer. Its promises are in the same file.
    longest = {name: found["longest_ms"] for name, found in measured.items() if not name.startswith("decide")}
    assert max(longest.values()) <= 2, longest


def test_the_size_of_a_full_batch_is_the_one_that_is_bounded() -> None:
    assert re.findall(r"fields >= (\d+)", scripts.text("counting/usage_new")) == [str(BATCH)]
    assert 2 * max(counting.MAX_COUNTERS, counting.MAX_SPENT_COUNTERS, MAX_LIMITS) <= BOUNDS["seal"][1] - BATCH


def refusals(number: int, *meters: str) -> list[RefusalCount]:
    names = tuple(Meter(name) for name in meters)
    return [RefusalCount(Usage("7", f"api_key:{n}", names), (3,) * len(meters), 1, 1, 2) for n in range(number)]


@pytest.mark.parametrize("meters", [1, 3, MAX_METERS])
def test_no_group_of_counts_is_larger_than_the_bound_and_none_is_lost(meters: int) -> None:
    counts = refusals(500, *(f"m{n}" for n in range(meters)))
    groups = list(in_bounds(counts))
    assert [one for group in groups for one in group] == counts
    sizes = [sum(len(one.costs) for one in group) for group in groups]
    assert max(sizes) <= counting.MAX_COUNTERS
    assert min(sizes[:-1]) > counting.MAX_COUNTERS - meters
    assert list(in_bounds([])) == []


def test_a_thousand_waiting_counts_are_sent_in_bounded_commands(redis_url: str, redis_client: RawRedis) -> None:
    counts = refusals(1000, "requests", "tokens")
    # Load the script, and learn the run of the server.
    assert send(current_server(), counts[:1]) == []
    redis_client.flushall()
    send(current_server(), counts[:1])
    redis_client.flushall()
    with commands_of_clients(redis_url) as commands:
        assert send(current_server(), counts) == []
    assert _largest(commands) <= counting.MAX_COUNTERS
    found: Any = {}
    for key in redis_client.keys("*:b:*") + redis_client.keys("*}:open"):
        for name, value in redis_client.hgetall(key).items():
            if name.startswith(b"d|"):
                found[name[-1:]] = found.get(name[-1:], 0) + int(value)
    assert found == {b"n": 4000, b"u": 12_000}
    assert len(counted(redis_client)) < BATCH + 2 * counting.MAX_COUNTERS


def _largest(commands: list[str]) -> int:
    """Return the largest number of counters of these commands, which all are the script that counts refusals."""
    assert {command.split()[0] for command in commands} == {"EVALSHA"}
    # EVALSHA, SHA-1, number of keys, two keys, run, nonce and periods. Then three arguments for each counter.
    return max((len(command.split(" ")) - 8) // 3 for command in commands)
