"""Measure the parts of a drain, the whole drain, and a bare insert of the same lines.

    python -m benchmarks.pairs.draining [--rounds 7] [--lines 300000] [--database sqlite]

Each round fills Redis with batches. The round first times each part for all of these batches, one part after the other
in one thread. Then it times the drain of the same batches. The drain does several parts at the same time. The processor
times of this process, of PostgreSQL and of Redis depend less on other programs than the elapsed time does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import report, servers

#: Seconds in one unit of /proc/<pid>/stat.
_TICK = 1 / os.sysconf("SC_CLK_TCK")
#: The parts, in the order of the table.
READ = "read the batches from Redis"
PARSE = "check and sort the lines, digests"
TEXT = "make the rows for COPY"
COPIES = "a COPY and a commit for each batch"
COPY = "one COPY of all lines"
DRAIN = "the drain"


@dataclass(slots=True)
class Part:
    """The times of a part in each round, in µs for each line: elapsed time, and processor times of three programs.

    `own` is the processor time of this process.
    """

    elapsed: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    database: list[float] = field(default_factory=list)
    redis: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs.draining", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which each part is timed once")
    parser.add_argument("--lines", type=int, default=300_000, help="lines of each round")
    parser.add_argument("--keys", type=int, default=10_000, help="keys with usage")
    parser.add_argument("--database", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    options = parser.parse_args(argv)
    with servers.redis_server(None) as redis_server, servers.database(options.database) as url:
        servers.start_django(servers.environment(redis_server, url))
        machine_info = report.machine(redis_server.url, ("psycopg",))
        parts = measure(options.rounds, options.lines, options.keys, redis_server.process.pid)
        from django.db import connection

        connection.close()
    results = {
        name: {kind: round(median(getattr(part, kind)), 3) for kind in ("elapsed", "own", "database", "redis")}
        for name, part in parts.items()
    }
    ratios = [bare / whole for bare, whole in zip(parts[COPY].elapsed, parts[DRAIN].elapsed, strict=True)]
    run = report.run_json(
        "pairs.draining",
        {**machine_info, "load_after": report.load()},
        vars(options),
        [],
        results=results,
        of_bare=round(median(ratios), 3),
    )
    print(text_of(run))
    report.write(run, options.out)
    return 0


def measure(rounds: int, lines: int, keys: int, redis_pid: int) -> dict[str, Part]:
    """Return the times of each part."""
    from django.db import connection

    from benchmarks.measured.usage import fill
    from ratelimits.usage.ledger.drain import drain

    parts = {name: Part() for name in (READ, PARSE, TEXT, COPIES, COPY, DRAIN)}
    postmaster = _postmaster()
    # The first drain also makes the rows of the shards.
    fill(0, min(lines, 2_000), keys)
    drain()

    def clocks() -> dict[str, float]:
        """Return all times up to now in seconds, by the field of `Part`."""
        return {
            "elapsed": time.perf_counter(),
            "own": time.process_time(),
            "database": _processor(postmaster, children=True),
            "redis": _processor(redis_pid),
        }

    def timed(name: str, work: Callable[[], Any]) -> Any:
        before = clocks()
        result = work()
        for kind, after in clocks().items():
            getattr(parts[name], kind).append((after - before[kind]) / lines * 1e6)  # µs for each line
        return result

    for number in range(1, rounds + 1):
        fill(number * lines, lines, keys)
        _time_parts(timed, connection)
        drained = timed(DRAIN, drain)
        assert drained.lines == lines, drained
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return parts


def _time_parts(timed: Callable[[str, Callable[[], Any]], Any], connection: Any) -> None:
    """Time the parts of a drain, and bare inserts, with the batches that are in Redis. The batches stay in Redis."""
    from ratelimits.engine.server import current_server
    from ratelimits.usage.ledger import apply, drain, packet
    from ratelimits.usage.ledger.pending import read_pending
    from ratelimits.usage.models.ledger import LINES_PER_BATCH, Line

    server = current_server()
    pending = read_pending(server, range(server.keyspace.shards), {})
    listed = [(one.shard, server.keyspace.batch(one.shard, name)) for one in pending for name in one.batches]
    client = server.wire.client
    fields = timed(READ, lambda: [(shard, list(drain.read_fields(client, key))) for shard, key in listed])
    packets = timed(PARSE, lambda: [packet.packet(shard, found) for shard, found in fields])
    texts = timed(
        TEXT,
        lambda: [
            b"".join(apply.copy_rows(number * LINES_PER_BATCH, number, one.lines)) for number, one in enumerate(packets)
        ],
    )
    table, columns = Line._meta.db_table, ", ".join(apply.COLUMNS)

    def insert(cursor: Any, texts: list[bytes]) -> None:
        for text in texts:
            if connection.vendor == "postgresql":
                with cursor.copy(f"COPY bare ({columns}) FROM STDIN") as copy:
                    copy.write(text)
            else:
                rows = [line.split("\t") for line in text.decode().splitlines()]
                cursor.executemany(f"INSERT INTO bare VALUES ({', '.join(['%s'] * len(rows[0]))})", rows)

    with connection.cursor() as cursor:
        for name, copied in ((COPIES, texts), (COPY, [b"".join(texts)])):
            if connection.vendor == "postgresql":
                cursor.execute(f"CREATE TABLE bare (LIKE {table} INCLUDING INDEXES)")
            else:
                cursor.execute(f"CREATE TABLE bare AS SELECT {columns} FROM {table} LIMIT 0")
            timed(name, partial(insert, cursor, copied))
            cursor.execute("DROP TABLE bare")


def _postmaster() -> int | None:
    """Return the id of PostgreSQL's first process; None for SQLite."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return None
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (backend,) = cursor.fetchone()
    _state, parent, *_others = _stat(backend)
    return int(parent)


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third field (the state) on.

    The manual page proc(5) describes them. Index 1 is the id of the parent. The indexes from 11 to 14 are processor
    times in ticks: in user mode, in system mode, and the same two for children that have ended.
    """
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _processor(process: int | None, *, children: bool = False) -> float:
    """Return the processor time of a process in seconds.

    With `children`, add the time of all child processes, also of those that have ended.
    """
    if process is None:
        return 0.0
    user, system, ended_user, ended_system = map(int, _stat(process)[11:15])
    ticks = user + system
    if children:
        ticks += ended_user + ended_system
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            try:
                ticks += sum(map(int, _stat(int(child))[11:13]))
            except OSError:  # it has ended meanwhile
                continue
    return ticks * _TICK


def rows_of(run: dict[str, Any]) -> list[tuple[str, float, float, float, float]]:
    """Return the rows of the table: the part and its times, in µs for each line."""
    return [
        (name, float(one["elapsed"]), float(one["own"]), float(one["database"]), float(one["redis"]))
        for name, one in run["results"].items()
    ]


#: The heads of the table.
HEADS = ("part, µs for each line", "elapsed", "processor: this process", "processor: database", "processor: Redis")


def text_of(run: dict[str, Any]) -> str:
    """Return the run as a table."""
    ratio = f"The drain writes {run['of_bare']:.2f} times as many lines per second as one COPY."
    return f"{report.table(HEADS, rows_of(run))}\n\n{ratio}"


if __name__ == "__main__":
    sys.exit(main())
