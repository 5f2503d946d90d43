"""Measure decisions on the server: µs per call, decisions per second of one core, and bytes per key.

    python -m benchmarks.server [--out DIR]

Server and client have one core each. The client sends batches without waiting for replies, so the server is always
busy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.support import report, servers


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds that every case takes part in")
    parser.add_argument("--calls", type=int, default=20_000, help="calls of each case in each round")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement of decisions per second")
    parser.add_argument("--users", type=int, default=1_000, help="users who send requests in turn")
    parser.add_argument("--keys", type=int, default=100_000, help="number of keys whose memory is measured")
    parser.add_argument("--server", type=servers.binary, help=servers.SERVER_HELP)
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    available = servers.cores()
    with servers.redis_server(available[0], options.server) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database), tables=False)
        servers.pin(available[-1])
        run = measure(options, redis_server.url)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _batches(options: argparse.Namespace, url: str) -> dict[str, tuple[str, list[bytes]]]:
    """Return, for each case, the title, and the commands for all users, joined into batches."""
    from benchmarks.measured import floors, ours
    from benchmarks.support.pipelines import FIRST_ID, batched, for_users, run_of
    from ratelimits.engine.assemble.scripts import resp
    from ratelimits.engine.call import new_nonce
    from ratelimits.engine.command import Command

    floors.load(url)
    server, now = ours.engine_server(), time.time_ns() // 1000

    def call_of(name: str, user: str) -> Any:
        return ours.calls(now, user)[name].call

    def ids(number: int) -> range:
        # Each case of the engine has its own users, because the size of a key's state affects the time.
        return range(FIRST_ID + number * options.users, FIRST_ID + (number + 1) * options.users)

    out = {}
    # Floors are scripts that call only the commands that every decision needs.
    for name, title, shape in floors.SHAPES:
        out[name] = title, list(batched(floors.bare(*shape, str(user)) for user in ids(0)))
    with redis.Redis.from_url(url) as client:
        run = run_of(client)
        for script in ours.scripts():
            client.script_load(script)
    for number, (name, (title, _call)) in enumerate(ours.calls(now).items()):
        made = for_users(server.keyspace, run, partial(call_of, name), ids(number))
        out[f"engine_{name}"] = title, list(batched(made))
    empty, three = floors.sha_of(floors.EMPTY), Command(server.keyspace, ours.calls(now)["three"].call).script.sha
    nothing = [resp(b"EVALSHA", empty, b"0")] * options.users
    out["empty"] = "an empty script", list(batched(nothing))
    # Replace the SHA-1 of the script in each command. Keys and arguments stay.
    with_arguments = [batch.replace(three, empty) for batch in out["engine_three"][1]]
    out["empty_with_arguments"] = "an empty script with the arguments of 3 rules on one key + metering", with_arguments
    users = (Command(server.keyspace, ours.calls(now, str(user))["three"].call) for user in ids(1))
    packed = (_packed(command.to_bytes(run, new_nonce()), empty) for command in users)
    out["empty_packed"] = "an empty script with these arguments in one string beside the keys", list(batched(packed))
    return out


def _packed(command: bytes, script: bytes) -> bytes:
    """Return a command with another script, and with all its arguments in one string."""
    from benchmarks.measured.threads import parts_of
    from ratelimits.engine.assemble.scripts import resp

    evalsha, _sha, count, *rest = parts_of(command)
    keys, arguments = rest[: int(count)], rest[int(count) :]
    return resp(evalsha, script, count, *keys, b"".join(arguments))


def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.support.pipelines import BATCH, Pipeline, per_second, wait_for_bin

    machine_info = report.machine(url)
    batches = _batches(options, url)
    micros: dict[str, list[float]] = {name: [] for name in batches}
    # Decisions per second, and the used part of the server's core.
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in batches}
    pipeline = Pipeline(url)
    with redis.Redis.from_url(url) as client:
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
            # Assume at least 5,000 calls per second. Commands are valid only in the bin in which they were made.
            wait_for_bin(len(batches) * (options.seconds + options.calls / 5_000))
            batches = _batches(options, url)
            for name, (_title, made) in batches.items():
                pipeline.send(made)  # not timed: after this, all keys exist
                client.config_resetstat()
                pipeline.send(made[n % len(made)] for n in range(max(options.calls // BATCH, 1)))
                micros[name].append(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])
                rates[name].append(per_second(url, made, options.seconds))
        memory = {name: _memory(client, url, name, options.keys) for name in ("one", "three", "ten")}
    pipeline.close()
    results = {
        name: {
            "title": title,
            "kind": "ours" if name.startswith("engine") else "floor",
            "usec_per_call": round(median(micros[name]), 3),
            "per_second": round(median(rate for rate, _share in rates[name])),
            "core_used": round(median(share for _rate, share in rates[name]), 3),
            # The script, and also the server's work to read the command and to write the reply.
            "core_us": round(median(share / rate for rate, share in rates[name]) * 1e6, 3),
        }
        for name, (title, _made) in batches.items()
    }
    return report.run_json(
        "server", {**machine_info, "load_after": report.load()}, vars(options), _claims(results, memory),
        results=results, memory=memory,
    )  # fmt: skip


def _memory(client: redis.Redis, url: str, name: str, keys: int) -> dict[str, Any]:
    """Return two sizes of a user's state, in bytes: MEMORY USAGE of its Redis key, and the server's growth per key."""
    from benchmarks.measured import ours
    from benchmarks.support.pipelines import BATCH, FIRST_ID, Pipeline, batched, for_users, run_of
    from ratelimits.engine.call import shard
    from ratelimits.engine.command import state_keys

    client.execute_command("FLUSHALL", "SYNC")
    server, now = ours.engine_server(), time.time_ns() // 1000
    count = max(keys // BATCH, 1) * BATCH
    before = client.info("memory")["used_memory"]
    pipeline = Pipeline(url)
    ids = range(FIRST_ID, FIRST_ID + count)
    pipeline.send(
        batched(for_users(server.keyspace, run_of(client), lambda user: ours.uncounted(now, name, user), ids))
    )
    pipeline.close()
    grown = client.info("memory")["used_memory"] - before
    call = ours.uncounted(now, name, str(FIRST_ID))
    key = state_keys(server.keyspace, call, [shard(server.keyspace, call.keys[0], call.account, call.in_account)])[0]
    return {
        "title": ours.calls(now)[name].title,
        "keys": count,
        "memory_usage": client.memory_usage(key),
        "growth_per_key": round(grown / count, 1),
    }


def _claims(results: dict[str, dict[str, Any]], memory: dict[str, dict[str, Any]]) -> list[report.Claim]:
    claims = [
        report.Claim(
            f"{text}, all of the server's work, × that of the bare script",
            1.6,
            results[f"engine_{name}"]["core_us"] / results[f"bare_{name}"]["core_us"],
        )
        for name, text in (("three", "3 rules on one key + metering"), ("kinds", "user + account + global + metering"))
    ]
    text = "three fixed-size rules, bytes per key (MEMORY USAGE)"
    return [*claims, report.Claim(text, 200, memory["three"]["memory_usage"])]


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    rows = [
        (
            result["title"],
            result["usec_per_call"],
            result["core_us"],
            result["per_second"],
            f"{result['core_used']:.0%}",
        )
        for result in run["results"].values()
    ]
    memory = [
        (result["title"], result["keys"], result["memory_usage"], result["growth_per_key"])
        for result in run["memory"].values()
    ]
    return "\n\n".join(
        [
            report.table(("on the server", "µs per call", "µs with I/O", "decisions/s", "of the core"), rows),
            report.table(("state of a user", "keys", "MEMORY USAGE, bytes", "growth per key, bytes"), memory),
            report.claims_table(run["claims"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
