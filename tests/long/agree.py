"""Replay random traces on the real scripts and on the exact model, and count the differences.

    python -m tests.long.agree [--decisions 1100000] [--seed 7] [--only ALGORITHM] [--show 3]

Run on REDIS_URL, else on an embedded Valkey; RATELIMITS_TEST_SERVER=redis6 means Redis 6.2. Print for each algorithm
how many lines were answered, how many were refused or waited, and how many differ; exit status 1 if any does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def server() -> Iterator[str]:
    from ratelimits.embedded import EmbeddedServer
    from tests.support.servers import server_binary

    if "REDIS_URL" in os.environ:
        yield os.environ["REDIS_URL"]
        return
    with tempfile.TemporaryDirectory() as directory:
        running = EmbeddedServer(
            Path(directory), binary=server_binary(os.environ.get("RATELIMITS_TEST_SERVER", "valkey"))
        )
        try:
            yield running.url
        finally:
            running.stop()


def main() -> int:
    from ratelimits.simulate import sandbox
    from tests.support.engine.replaying import EngineReplay, opening
    from tests.traces.agreement import Open, first_difference, shortest, trace
    from tests.traces.rules import RULES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=1_100_000)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", choices=list(RULES))
    parser.add_argument("--show", type=int, default=3, help="disagreements shown per algorithm")
    options = parser.parse_args()
    algorithms = [options.only] if options.only else list(RULES)
    total = differing = 0
    with server() as url, sandbox(url) as wire, opening(wire) as reopen:

        def once(rule: object) -> EngineReplay:
            return reopen(rule)

        open_replay: Open = once
        for algorithm in algorithms:
            counts: Counter[str] = Counter()
            started = time.monotonic()
            while counts["lines"] < options.decisions / len(algorithms):
                counts["traces"] += 1
                rule, lines, answers = trace(algorithm, f"{options.seed}.{counts['traces']}", options.length)
                counts["lines"] += len(lines)
                counts["refused"] += sum(not answer["allowed"] for answer in answers)
                counts["never"] += sum(answer["retry_after"] is None for answer in answers)
                counts["waiting"] += sum(answer["wait"] > 0 for answer in answers)
                opened: list[EngineReplay] = []

                def closing(rule: object, opened: list[EngineReplay] = opened) -> EngineReplay:
                    opened.append(EngineReplay(wire, rule))
                    return opened[-1]

                found = first_difference(closing, rule, lines, answers)
                for one in opened:
                    one.simulator.close()
                if found is not None:
                    counts["differing"] += 1
                    if counts["differing"] <= options.show:
                        print(f"\n{algorithm}, trace {options.seed}.{counts['traces']}:")
                        print(shortest(open_replay, found), flush=True)
            total, differing = total + counts["lines"], differing + counts["differing"]
            print(
                f"{algorithm:20} {counts['lines']:>9,} decisions in {counts['traces']:,} traces:"
                f" {counts['refused']:,} refused ({counts['never']:,} for ever), {counts['waiting']:,} waiting,"
                f" {counts['differing']:,} traces differ  [{time.monotonic() - started:.0f} s]",
                flush=True,
            )
    print(f"{'all':20} {total:>9,} decisions, {differing:,} traces differ")
    return 1 if differing else 0


if __name__ == "__main__":
    from django.conf import settings

    settings.configure()
    sys.exit(main())
