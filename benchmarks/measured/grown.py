"""The process of one size of benchmarks.growth. It makes rows and keys. Then it times blocks of calls on request."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from benchmarks.measured.sizes import Size
from benchmarks.support import servers

#: Maximum number of different users in the requests of a process. The process makes their names before it measures.
MAX_USERS = 200_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


def work(size: Size, load: str | None) -> int:
    """Print that the process is ready. For each number in the input, make this number of calls, and print their times.

    The times are in ns. With `load`, only measure the time ("time") or the memory ("memory") to load the overrides.
    """
    environment = {name: os.environ[name] for name in os.environ if name.startswith("BENCHMARK_")}
    servers.start_django({"DJANGO_SETTINGS_MODULE": "benchmarks.support.settings", **environment})
    make_rows(size)
    if load:
        answer = load_time() if load == "time" else load_memory()
        print(json.dumps(answer), flush=True)
        return 0
    make_keys(size)
    call = requests(size)
    for _ in range(100):
        call()
    print(json.dumps("ready"), flush=True)
    clock = time.perf_counter_ns
    for line in sys.stdin:
        gc.collect()
        for _ in range(30):  # not timed: these calls load code and data into the processor's caches
            call()
        times = []
        for _ in range(int(line)):
            start = clock()
            call()
            times.append(clock() - start)
        print(json.dumps(times), flush=True)
    return 0


def make_rows(size: Size) -> None:
    """Make the rules and overrides if the database has none.

    Only `size.limits` of the rules apply to the timed requests. No override applies to the timed requests.
    """
    from benchmarks.measured import ours
    from ratelimits.models import KeyOverride, Rule
    from ratelimits.models.versions import editing

    if Rule.objects.exists():
        return
    # Rules with the scope "*" apply to every request. With three limits, one of the rules bills.
    applying = ours.ten_rules("*")[: size.limits] if size.limits != 3 else ours.usual_rules("*", "usual", bills=True)
    others = [ours.row(f"other-{number}", "second", f"scope{number}") for number in range(size.rules - len(applying))]
    overrides = [
        KeyOverride(key=f"user:{5_000_000 + number}", rule="usual-second", capacity=2_000_000)
        for number in range(size.overrides)
    ]
    with editing("default"):
        Rule.objects.bulk_create([*applying, *others])
        KeyOverride.objects.bulk_create(overrides, batch_size=2_000)


def make_keys(size: Size) -> None:
    """Make one live key for each of `size.keys` users, if the server does not have these keys."""
    import redis
    from django.conf import settings

    from benchmarks.measured import ours
    from benchmarks.support.pipelines import BATCH, FIRST_ID, Pipeline, batched, for_users, run_of
    from ratelimits.engine.call import Call, shard
    from ratelimits.engine.command import Command
    from ratelimits.engine.program import Term, program
    from ratelimits.engine.server import current_server

    if size.keys <= 1:
        return
    url, keyspace = str(settings.CACHES["ratelimits"]["LOCATION"]), current_server().keyspace
    first = f"{FIRST_ID}"
    with redis.Redis.from_url(url) as client:
        # Look only for a key in the namespace of this size, because several sizes share a server.
        if client.exists(keyspace.state(shard(keyspace, f"user:{first}", first, ("user:",)), f"user:{first}")):
            return
        selection = ours.selected("*", ours.someone("42"))
        terms = tuple(
            Term(rule.algorithm, rule.name, key=0, slot=0, rule=rule.rule, version=rule.version, since=rule.since)
            for rule in selection.rules
        )
        limits = program(terms)

        def call_of(user: str) -> Call:
            return Call(limits, (f"user:{user}",), (1,), user, version=selection.version, in_account=("user:",))

        client.script_load(Command(keyspace, call_of(first)).script.text)

        # Round the number of users up to whole batches.
        ids = range(FIRST_ID, FIRST_ID + -(-size.keys // BATCH) * BATCH)
        pipeline = Pipeline(url)
        pipeline.send(batched(for_users(current_server().keyspace, run_of(client), call_of, ids)))
        pipeline.close()


def requests(size: Size) -> Any:
    """Return a function that makes one request of the next user."""
    from benchmarks.support.pipelines import FIRST_ID
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    draw = random.Random(1)
    count = min(size.spread, MAX_USERS)
    ids = draw.sample(range(FIRST_ID, FIRST_ID + size.keys), count) if count > 1 else [FIRST_ID]
    # The ids are in random order. So the states of two users who follow each other are not neighbours in Redis' memory.
    turns = itertools.cycle([f"{number}" for number in ids])

    def ask() -> None:
        user = next(turns)
        if not checking.check(Identity(user=f"user:{user}", account=f"account:{user}"), "any", "GET").allowed:
            raise AssertionError("refused")

    return ask


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _load_all() -> Any:
    """Read the rows about the keys of all shards. Return the snapshot that contains them."""
    from ratelimits import rules
    from ratelimits.models.versions import KEY_SHARDS
    from ratelimits.rules import query_thread
    from ratelimits.rules.snapshot import MissingRows

    # Seconds. The default is shorter, because a request reads the rows of only one shard.
    query_thread.PATIENCE = 600.0
    every = frozenset(range(KEY_SHARDS))
    snapshot = asyncio.run(rules._loader.aload(MissingRows(every)))
    snapshot._with_rows(every)  # evaluates the rows of each shard, as the first request of a shard does
    return snapshot


def load_time() -> dict[str, Any]:
    """Return the seconds until all overrides are read, and the growth of the process in MB."""
    from ratelimits import rules

    rules.current()
    gc.collect()
    before, start = _resident(), time.perf_counter()
    snapshot = _load_all()
    seconds = time.perf_counter() - start
    gc.collect()
    assert snapshot.version
    return {"seconds": round(seconds, 3), "resident_mb": round((_resident() - before) / 1e6, 2)}


def load_memory() -> dict[str, Any]:
    """Return the memory in MB that Python's objects for the overrides take: at the end, and at most.

    Unused memory of the allocator is not included.
    """
    from ratelimits import rules

    rules.current()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    snapshot = _load_all()
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    assert snapshot.version
    return {"held_mb": round((held - before) / 1e6, 2), "peak_mb": round((peak - before) / 1e6, 2)}
