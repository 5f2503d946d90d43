"""Measure the server's processor time for a decision: to run the script, to read the command and to write the reply."""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from statistics import median
from typing import Any

import redis

from benchmarks.measured import floors, ours
from benchmarks.measured.ratios import COMMANDS
from benchmarks.support.pipelines import FIRST_ID, Pipeline, batched, for_users, per_second, run_of, wait_for_bin
from ratelimits.algorithms.limits import TokenBucket
from ratelimits.engine.call import Call
from ratelimits.engine.command import Command
from ratelimits.engine.keys import Keyspace

#: A limit that refuses nearly all requests.
TIGHT = TokenBucket(capacity=1, rate=Decimal(1), period=Decimal(3600))


def _calls(now: int) -> dict[str, Callable[[str], Call]]:
    """Return a function for each case. The function takes a user's id and returns the call for this user."""
    return {
        "engine_three": lambda user: ours.calls(now, user)["three"].call,
        "engine_kinds": lambda user: ours.calls(now, user)["kinds"].call,
        "admitted": lambda user: ours.call_of([("wide", ours.PER_SECOND)], now, user=user),
        "refused": lambda user: ours.call_of([("tight", TIGHT)], now, user=user),
    }


def batches(client: redis.Redis, users: int) -> dict[str, list[bytes]]:
    """Return the commands of each case for all users, joined into batches. Load the scripts of these commands."""
    keyspace, now, run = Keyspace("core", 64), time.time_ns() // 1000, run_of(client)

    def ids(number: int) -> range:
        # Each case of this app has its own users: all limits of one key share a state, and a larger state takes more
        # time. All cases of the bare script can use the same users: each case has its own states, because the name of a
        # state contains the number of its limits.
        return range(FIRST_ID + number * users, FIRST_ID + (number + 1) * users)

    out = {}
    for name, _title, shape in floors.SHAPES:
        out[name] = list(batched(floors.bare(*shape, str(user)) for user in ids(0)))
    for number, (name, call_of) in enumerate(_calls(now).items()):
        # The script also depends on the shards of the keys. The commands of the first 500 users need all scripts.
        for script in {Command(keyspace, call_of(str(user))).script.text for user in ids(number)[:500]}:
            client.script_load(script)
        out[name] = list(batched(for_users(keyspace, run, call_of, ids(number))))
    return out


def measure(urls: dict[str, str], rounds: int, seconds: float, users: int) -> dict[str, dict[str, Any]]:
    """Return, for each server, the processor time of each case's command in µs, and the ratios of these times.

    Servers and cases take turns in each round. A measurement takes `seconds` seconds, and each case has `users` users.
    """
    names = sorted({name for ratio in COMMANDS.values() for name in (ratio.one, ratio.other)})
    times: dict[str, dict[str, list[float]]] = {server: {name: [] for name in names} for server in urls}
    for url in urls.values():
        floors.load(url)
    for _round in range(rounds):
        # Allow 2 s to make the commands for a server, and 0.5 s to send the commands of a case once.
        wait_for_bin(len(urls) * (2 + len(names) * (0.5 + seconds)))
        for server, url in urls.items():
            with redis.Redis.from_url(url) as client:
                made = batches(client, users)
            for name in names:
                allowed = name != "refused"
                # First send each command once, untimed. The first request of a key takes longer, and is admitted even
                # by the limit of the case "refused".
                pipeline = Pipeline(url, None)
                pipeline.send(made[name])
                pipeline.close()
                rate, used_part = per_second(url, made[name], seconds, allowed)
                times[server][name].append(used_part / rate * 1e6)  # µs of the core for each command
    return {
        server: {
            "core_us": {name: round(median(some), 3) for name, some in found.items()},
            "ratios": {
                name: round(median(a / b for a, b in zip(found[ratio.one], found[ratio.other], strict=True)), 3)
                for name, ratio in COMMANDS.items()
            },
        }
        for server, found in times.items()
    }
