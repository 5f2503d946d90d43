"""Let random customers live for many months, and count where their bills differ from those of an exact model.

    python -m tests.long.months [--customers 2000] [--months 24] [--together 100] [--seed 7] [--only NUMBER] [--show 5]

Some customers live together, in one database, with one setting of LATE_USAGE: this is a history. Print for each history
what happened, what was compared, and how many differences there are; exit status 1 if there is one. `--only` repeats
one history. RATELIMITS_TEST_DATABASE=postgres means PostgreSQL, and RATELIMITS_TEST_SERVER=redis6 means Redis 6.2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any


def histories(customers: int, together: int, only: int | None) -> Iterator[tuple[int, int, str, bool]]:
    """Yield the number of each history, how many customers it has, its LATE_USAGE, and whether raw SQL disturbs it."""
    for number, first in enumerate(range(0, customers, together)):
        if only in (None, number):
            yield number, min(together, customers - first), ("version", "period")[number % 2], number % 4 > 1


def compare(options: argparse.Namespace, redis_url: str) -> int:
    """Run the histories, and return the number of differences."""
    import django

    django.setup()
    import redis
    from django.core.management import call_command
    from django.test import override_settings

    from ratelimits.engine.server import isolate
    from tests.support.database import Flush
    from tests.support.plain import PLAIN
    from tests.support.reports.months import SETTINGS, History
    from tests.support.reports.months_compared import Comparison

    call_command("migrate", verbosity=0)
    server, total = redis.Redis.from_url(redis_url), Counter[str]()

    def always_fsync(on: bool) -> Any:
        return server.config_set("appendfsync", "always" if on else "everysec")

    for number, customers, late_usage, disturbed in histories(options.customers, options.together, options.only):
        started = time.monotonic()
        with override_settings(RATELIMITS={**PLAIN, **SETTINGS, "LATE_USAGE": late_usage}):
            seed = f"{options.seed}.{number}"
            history = History(seed, customers, options.months, late_usage, always_fsync, disturbed=disturbed)
            history.run()
            comparison = Comparison(history)
            found = list(comparison.differences())
        counts = Counter(customers=customers) + Counter(history.counts) + comparison.counts
        total += counts + Counter(differences=len(found))
        print(
            f"history {seed} ({late_usage}{', disturbed' * disturbed}): {listed(counts)}; {len(found)} differences"
            f"  [{time.monotonic() - started:.0f} s]",
            *(f"    {difference}" for difference in found[: options.show]),
            sep="\n",
            flush=True,
        )
        call_command(Flush(), database="default", verbosity=0, interactive=False)
        server.flushall()
        isolate("")
    print(f"all, over {options.months} months: {listed(total)}; {total['differences']:,} differences")
    return total["differences"]


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if what != "differences")


def main() -> int:
    from tests.support.servers import TestServers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--customers", type=int, default=2000)
    parser.add_argument("--months", type=int, default=24)
    parser.add_argument("--together", type=int, default=100, help="customers of one history")
    parser.add_argument("--seed", default="7")
    parser.add_argument("--only", type=int, help="the number of one history")
    parser.add_argument("--show", type=int, default=5, help="differences shown per history")
    options = parser.parse_args()
    server, database = (
        os.environ.get(f"RATELIMITS_TEST_{name}", default)
        for name, default in (("SERVER", "valkey"), ("DATABASE", "sqlite"))
    )
    servers = TestServers(server, database)
    try:
        os.environ.update(servers.environment)
        return 1 if compare(options, servers.redis.url) else 0
    finally:
        servers.stop()


if __name__ == "__main__":
    sys.exit(main())
