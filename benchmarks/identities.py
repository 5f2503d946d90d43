"""Measure the memory and the connections of a process if a million users, accounts and addresses send one request each.

    python -m benchmarks.identities [--identities N] [--out DIR]

In the phase "admitted" all requests are admitted. In the phase "refused" all requests are refused. In the phase
"unavailable" Redis does not answer, and the failure policy "local" decides.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from benchmarks.support import report, servers

#: Number of times that the memory is measured in each phase.
MEASUREMENTS = 10
#: Maximum growth of the process from the start of the first phase to the end of each phase.
MAX_GROWTH_MB = 350
#: Maximum growth of the process from the middle of a phase to its end.
MAX_LATER_GROWTH_MB = 40


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.identities", description=__doc__.splitlines()[0])
    parser.add_argument("--identities", type=int, default=1_000_000, help="identities of each phase")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    with servers.redis_server(None) as redis_server, servers.database("sqlite") as database:
        servers.start_django(servers.environment(redis_server, database))
        run = measure(options, redis_server)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def resident_mb() -> float:
    """Return the resident memory of this process now, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def measure(options: argparse.Namespace, redis_server: Any) -> dict[str, Any]:
    """Run all measurements and return them for the JSON file."""
    from benchmarks.measured import ours
    from ratelimits.engine.server import current_server
    from ratelimits.models import Rule
    from ratelimits.models.versions import editing
    from ratelimits.quota import checking, from_memory

    rows = [
        ours.row("user", "month", "admitted"),
        ours.row("address", "month", "admitted", "ip"),
        ours.row("all", "month", "refused", "global", capacity=1),
        ours.row("local", "month", "unavailable", on_failure="local"),
        ours.row("local-address", "month", "unavailable", "ip", on_failure="local"),
    ]
    with editing("default"):
        Rule.objects.bulk_create(rows)
    checking.check(invented("warm", 0), "admitted", "GET")
    machine_info = report.machine(redis_server.url)
    # After this, the garbage collector ignores the present objects. So each measurement of the memory takes less time.
    gc.freeze()
    before = resident_mb()
    phases: dict[str, dict[str, Any]] = {}

    def phase(name: str, connections: Callable[[], int | None]) -> None:
        grown = []  # MB
        step = max(options.identities // MEASUREMENTS, 1)
        for number in range(options.identities):
            checking.check(invented(name, number), name, "GET")
            if (number + 1) % step == 0:
                grown.append(round(resident_mb() - before, 1))
        phases[name] = {"grown_mb": grown, "connections": connections()}

    with redis.Redis.from_url(redis_server.url) as client:
        # Of all connections, one makes decisions. `others` counts the rest, such as the connection of this client.
        others = len(client.client_list()) - 1
        for name in ("admitted", "refused"):
            phase(name, lambda: len(client.client_list()) - others)
    with stopped(redis_server):
        phase("unavailable", lambda: None)
    current_server().wire.client.close()
    from_memory.denials.clear()
    claims = []
    for name, result in phases.items():
        _first, half, end = growth_at(result["grown_mb"])
        text = f"invented identities, {name}: growth of memory"
        claims += [
            report.Claim(f"{text}, MB", MAX_GROWTH_MB, end),
            report.Claim(f"{text} in the second half, MB", MAX_LATER_GROWTH_MB, end - half),
        ]
    claims.append(
        report.Claim(
            "invented identities: connections", 3, max(result["connections"] or 0 for result in phases.values())
        )
    )
    return report.run_json(
        "identities",
        {**machine_info, "load_after": report.load()},
        vars(options),
        claims,
        before_mb=before,
        phases=phases,
    )


def growth_at(grown: list[float]) -> tuple[float, float, float]:
    """Return the growth of memory after the first tenth, after half, and after all of the requests of a phase.

    `grown` has the growth after about each tenth of the requests. If there are few requests, the tenths are not exact.
    """
    return grown[0], grown[(len(grown) - 1) // 2], grown[-1]


def invented(phase: str, number: int) -> Any:
    """Return an identity with a user, an account and an address that were not used before."""
    from ratelimits.identity import Identity

    name = f"{phase}-{number}"
    return Identity(
        user=f"user:{name}", account=f"account:{name}", address=f"ip:2001:db8:{number >> 16:x}:{number & 0xFFFF:x}::/64"
    )


@contextmanager
def stopped(redis_server: Any) -> Iterator[None]:
    """Stop the server, so that the failure policy decides. Meanwhile switch off the app's log, which would be long."""
    logging.getLogger("ratelimits").setLevel(logging.CRITICAL)
    redis_server.stop()
    try:
        yield
    finally:
        logging.getLogger("ratelimits").setLevel(logging.NOTSET)


def text_of(run: dict[str, Any]) -> str:
    """Return the run as tables."""
    identities = int(run["options"]["identities"])
    rows = [(name, *growth_at(result["grown_mb"])) for name, result in run["phases"].items()]
    heads = (f"{identities:,} invented identities", "MB after a tenth", "after half", "after all")
    connections = max(result["connections"] or 0 for result in run["phases"].values())
    return "\n\n".join(
        [
            report.table(heads, rows),
            f"The process had {run['before_mb']:.0f} MB before the first phase, and at most {connections} connections.",
            report.claims_table(run["claims"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
