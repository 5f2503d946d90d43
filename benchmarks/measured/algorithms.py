"""Measure four kinds of requests for each algorithm on the server: admitted, refused, in shadow mode, first of a key.

    python -m benchmarks.measured.algorithms [--server valkey redis7 redis6] [--rounds 60] [--out DIR]

Also measure whole requests on the server, with the work to read commands and to write replies. Decisions are compared
with the bare script. Refusals of 1,000 keys are compared with admitted requests of 1,000 other keys. This command
prints each ratio of server times for which docs/performance.md has a target.

All cases of all servers take turns. The time of an algorithm is the time that the server reports for EVALSHA (INFO
commandstats). The smallest time of all rounds is used, because other processes can only make a call slower. The
rounds are short, so that in some of them no other process runs. For whole requests, the benchmark uses the processor
time of the server's main thread, and the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from benchmarks.measured.ratios import ALGORITHMS, COMMANDS, largest, rows_of
from benchmarks.support import report, servers

if TYPE_CHECKING:
    from ratelimits.engine.command import Command

#: A million permits per second: a limit with this rate admits every request of the benchmark.
_FAST_RATE = {"rate": 1_000_000, "period": 1}
#: By algorithm: numbers with which it admits all requests, and numbers with which it refuses nearly all requests.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token_bucket": (_FAST_RATE, {"rate": 1, "period": 3600, "capacity": 1}),
    "gcra": (_FAST_RATE, {"rate": 1, "period": 3600, "capacity": 1}),
    "leaky_bucket": (_FAST_RATE, {"rate": 1, "period": 3600, "capacity": 1}),
    "leaky_bucket_queue": ({**_FAST_RATE, "delay_after": 1_000_000}, {"rate": 1, "period": 3600, "capacity": 1}),
    "fixed_window": ({"period": 3600}, {"period": 3600, "capacity": 1}),
    "calendar_window": ({"calendar_unit": "month"}, {"calendar_unit": "month", "capacity": 1}),
    "sliding_window": ({"period": 60}, {"period": 3600, "capacity": 1}),
    "sliding_log": ({"period": 60}, {"period": 3600, "capacity": 1}),
    "smooth_bursty": (_FAST_RATE, {"rate": 1, "period": 3600}),
    "smooth_warming_up": (_FAST_RATE, {"rate": 1, "period": 3600}),
    "concurrency": ({"lease_ttl": 60}, {"lease_ttl": 3600, "capacity": 1}),
}
#: Maximum number of first requests in each round. Each comes from a new user.
_NEW_KEYS = 100


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured.algorithms", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--server", nargs="+", default=["valkey"], help=f"one or more of {servers.SERVER_HELP}")
    parser.add_argument("--rounds", type=int, default=60, help="rounds that every algorithm takes part in")
    parser.add_argument("--calls", type=int, default=192, help="calls of each case in each round")
    parser.add_argument("--core-rounds", type=int, default=6, help="rounds that whole requests take part in")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of each measurement of whole requests")
    parser.add_argument("--users", type=int, default=1_000, help="number of keys in each case of whole requests")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    available = servers.cores()
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(servers.redis_server(available[0], servers.binary(name)))
            for name in options.server
        }
        first = next(iter(running.values()))
        database = stack.enter_context(servers.database("sqlite"))
        servers.start_django(servers.environment(first, database), tables=False)
        servers.pin(available[-1])
        from benchmarks.measured import core_time

        urls = {report.machine(server.url)["server"]: server.url for server in running.values()}
        machine_info = report.machine(first.url)
        micros = _measure(urls, options.rounds, options.calls)
        whole = core_time.measure(urls, options.core_rounds, options.seconds, options.users)
    results = {name: {"algorithms": _ratios(micros[name]), **whole[name]} for name in urls}
    claims, targets = _claims(results[machine_info["server"]])
    machine_info = {**machine_info, "server": ", ".join(urls), "load_after": report.load()}
    run = report.run_json("measured.algorithms", machine_info, vars(options), claims, targets, results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _commands(algorithm: str, numbers: dict[str, Any], shadow: bool = False) -> Callable[[str], Command]:
    """Return a function that takes a user's id and makes the command for this user."""
    from ratelimits.algorithms.limits import Mode, algorithm_from_json
    from ratelimits.engine.call import Call
    from ratelimits.engine.command import Command
    from ratelimits.engine.keys import Keyspace
    from ratelimits.engine.program import Term, program

    limit = algorithm_from_json({"algorithm": algorithm, "capacity": 1_000_000, **numbers})
    mode = Mode.SHADOW if shadow else Mode.ENFORCE
    terms, keyspace = program((Term(limit, "limit", key=0, slot=0, mode=mode),)), Keyspace("engine", 64)
    return lambda user: Command(keyspace, Call(terms, (f"user:{user}",), (1,), "account", in_account=("user:",)))


def _send(client: redis.Redis, run: str, commands: Sequence[Command], allowed: bool | None) -> float:
    """Send commands, and return the mean time in µs that the server takes for one command.

    `allowed` says whether each request must be admitted (None: it can be admitted or refused). Raise AssertionError if
    the server replies with an error, or if a request is not decided as expected.
    """
    from ratelimits.engine.call import new_nonce

    connection = client.connection_pool.get_connection()
    client.config_resetstat()
    for start in range(0, len(commands), 100):
        portion = commands[start : start + 100]
        connection.send_packed_command([b"".join(command.to_bytes(run, new_nonce()) for command in portion)])
        for _command in portion:
            reply = connection.read_response()
            assert not isinstance(reply, Exception), reply
            # A reply begins with two 64-bit numbers: 1 if the request was decided, and 1 if it is admitted.
            decision = struct.unpack_from("<2q", reply)
            assert allowed is None or decision == (1, allowed), decision
    client.connection_pool.release(connection)
    return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def _measure(urls: dict[str, str], rounds: int, calls: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the smallest time of all rounds in µs, by server, algorithm and kind of request."""
    from benchmarks.support.pipelines import run_of

    new_users = iter(range(1_000_000, 10_000_000))
    clients = {name: redis.Redis.from_url(url) for name, url in urls.items()}
    runs = {name: run_of(client) for name, client in clients.items()}
    # Commands that are sent again and again. A wide limit admits every request, and a tight limit refuses nearly all.
    fixed = {
        algorithm: (
            _commands(algorithm, wide)(f"{algorithm}-wide"),
            _commands(algorithm, wide, shadow=True)(f"{algorithm}-shadow"),
            _commands(algorithm, tight)(f"{algorithm}-tight"),
        )
        for algorithm, (wide, tight) in CASES.items()
    }
    for client in clients.values():
        for commands in fixed.values():
            for command in commands:
                client.script_load(command.script.text)
    out: dict[str, dict[str, dict[str, float]]] = {name: {} for name in urls}
    for _round in range(rounds):
        for algorithm, (wide, _tight) in CASES.items():
            admitted, shadow, refused = fixed[algorithm]
            admits = _commands(algorithm, wide)
            first = [admits(f"{next(new_users)}") for _ in range(min(calls, _NEW_KEYS))]
            for name, client in clients.items():
                run = runs[name]
                # Not timed: after this, the keys exist, and the tight limit has no permits left.
                _send(client, run, [admitted, shadow, refused, refused], None)
                times = {
                    "first": _send(client, run, first, True),
                    "admitted": _send(client, run, [admitted] * calls, True),
                    "shadow": _send(client, run, [shadow] * calls, True),
                    "refused": _send(client, run, [refused] * calls, False),
                }
                smallest = out[name].setdefault(algorithm, times)
                for kind, micros in times.items():
                    smallest[kind] = min(smallest[kind], micros)
    for client in clients.values():
        client.close()
    return out


def _ratios(micros: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the times and ratios of each algorithm, from its time (µs) for each kind of request."""
    token_bucket = micros["token_bucket"]["admitted"]
    return {
        algorithm: {
            "admitted_us": times["admitted"],
            "refused_us": times["refused"],
            "of_token_bucket": round(times["admitted"] / token_bucket, 3),
            "refused_of_admitted": round(times["refused"] / times["admitted"], 3),
            "first_of_admitted": round(times["first"] / times["admitted"], 3),
            "shadow_of_enforced": round(times["shadow"] / times["admitted"], 3),
        }
        for algorithm, times in micros.items()
    }


def _claims(server: dict[str, Any]) -> tuple[list[report.Claim], list[report.Claim]]:
    """Return the promises and the targets for one server."""

    def of_algorithms(name: str) -> report.Claim:
        title, bound = ALGORITHMS[name]
        which, value = largest(server, name)
        return report.Claim(f"on the server, largest ratio of an algorithm: {title} ({which})", bound, value)

    def of_requests(name: str) -> report.Claim:
        text = f"processor time of the server: {COMMANDS[name].text}"
        return report.Claim(text, COMMANDS[name].bound, server["ratios"][name])

    promises = [of_algorithms("refused_of_admitted"), of_algorithms("shadow_of_enforced"), of_requests("refused")]
    targets = [of_algorithms("of_token_bucket"), of_algorithms("first_of_admitted")]
    return promises, [*targets, of_requests("three"), of_requests("kinds")]


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables. A ratio above its target has a star."""
    out = []
    for server, found in run["results"].items():
        rows = [
            (
                algorithm,
                one["admitted_us"],
                one["refused_us"],
                *(
                    f"{one[name]:.2f}{'' if one[name] <= bound else ' *'}"
                    for name, (_title, bound) in ALGORITHMS.items()
                ),
            )
            for algorithm, one in found["algorithms"].items()
        ]
        heads = (f"{title} (≤ {bound})" for title, bound in ALGORITHMS.values())
        out.append(report.table((server, "admitted, µs", "refused, µs", *heads), rows))
    out.append(report.table(("ratio", "target", *run["results"]), rows_of(run["results"])))
    return "\n\n".join([*out, report.claims_table(run["claims"]), report.claims_table(run["targets"], "target")])


if __name__ == "__main__":
    sys.exit(main())
