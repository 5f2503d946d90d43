"""Measure what a decision costs if a user's count is not in the shard of the account that pays.

    python -m benchmarks.pairs.accounts [--out DIR]

A rule counts per user, and the request is counted as usage of an account. If the user is the account, or if the project
promises one account for each key (ONE_ACCOUNT_PER_KEY), both are in one shard. Otherwise they are in two. On one server
the call then names one more Redis key. On a cluster the two shards are perhaps on two nodes, and so need two calls. The
cases of a place are timed in turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from benchmarks.support import report, servers
from benchmarks.support.timing import Case, interleaved
from ratelimits.embedded import EmbeddedServer, free_port

#: Place -> its description.
PLACES = {"server": "one server", "cluster": "a cluster of three nodes, user and account on two of them"}
_NODES, _SLOTS = 3, 16_384


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.accounts", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds that every case takes part in")
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each case in each round")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    with servers.redis_server(servers.cores()[0]) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database), tables=False)
        machine_info = report.machine(redis_server.url)
        results = {"server": _measure(options.rounds, options.calls)}
        with _cluster() as url, _settings(url):
            results["cluster"] = _measure(options.rounds, options.calls)
    machine_info = {**machine_info, "load_after": report.load()}
    run = report.run_json("pairs.accounts", machine_info, vars(options), [], results=results)
    print(table(run))
    report.write(run, options.out)
    return 0


def table(run: dict[str, Any]) -> str:
    """Return the table of a run."""
    columns = ("where", "in one shard, µs", "in two shards, µs", "times")
    rows = [(PLACES[place], one["one_us"], one["two_us"], one["times"]) for place, one in run["results"].items()]
    return report.table(columns, rows)


def _measure(rounds: int, calls: int) -> dict[str, float]:
    cases = [Case(name, name, "ours", _decide(in_account)) for name, in_account in (("one", ("user:",)), ("two", ()))]
    timed = interleaved(cases, rounds, calls)
    medians = {f"{name}_us": timed[name].to_json()["median_us"] for name in ("one", "two")}
    return {**medians, "times": round(timed["two"].ratio(timed["one"]), 2)}


def _decide(in_account: tuple[str, ...]) -> Callable[[], object]:
    """Return a function that decides a request of a user. The shard of the user is not the account's."""
    from benchmarks.measured.ours import PER_SECOND, call_of, engine_server, usage
    from ratelimits.engine.call import shard
    from ratelimits.engine.cluster.split import slot_of
    from ratelimits.engine.command import Command
    from ratelimits.engine.decide import decide_call

    server, now = engine_server(), time.time_ns() // 1000
    third = _SLOTS // _NODES + 1

    def node_of(key: str) -> int:
        return slot_of(server.keyspace, shard(server.keyspace, key)) // third

    user = next(str(number) for number in range(1000) if node_of(f"user:{number}") != node_of("account:acme"))
    counted = usage(now, user)._replace(account="acme")
    call = call_of([("second", PER_SECOND)], now, user=user)
    call = call._replace(account="acme", usage=counted, in_account=in_account)
    command = Command(server.keyspace, call)
    return lambda: decide_call(server, call, command).allowed


@contextmanager
def _cluster() -> Iterator[str]:
    """Start three nodes, each with a third of the slots; yield the address of the first."""
    options = {"cluster-enabled": "yes", "appendfsync": "everysec"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        nodes, clients = [], []
        for number in range(_NODES):
            nodes.append(EmbeddedServer(Path(folder) / str(number), port=_port(), aof=True, options=options))
            stack.callback(nodes[-1].stop)
            clients.append(stack.enter_context(redis.Redis(port=nodes[-1].port)))
        for number, client in enumerate(clients):
            client.cluster("SET-CONFIG-EPOCH", number + 1)
            client.cluster("ADDSLOTS", *range(_SLOTS * number // _NODES, _SLOTS * (number + 1) // _NODES))
            client.cluster("MEET", "127.0.0.1", nodes[0].port)
        while not all(_agrees(client) for client in clients):
            time.sleep(0.05)
        yield nodes[0].url


def _port() -> int:
    """Return a free port whose bus port, which is 10,000 higher, exists."""
    return next(port for port in iter(free_port, 0) if port < 55_000)


def _agrees(client: redis.Redis) -> bool:
    state: Any = client.cluster("INFO")
    return state["cluster_state"] == "ok" and len(client.execute_command("CLUSTER SLOTS")) == _NODES


def _settings(url: str) -> Any:
    from django.test import override_settings

    factory = {"CONNECTION_FACTORY": "ratelimits.django_redis_cluster.ConnectionFactory"}
    alias = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": factory}
    return override_settings(CACHES={"ratelimits": alias, "default": alias})


if __name__ == "__main__":
    sys.exit(main())
