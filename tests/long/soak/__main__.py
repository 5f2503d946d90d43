"""Run everything at full load for a long time: `python -m tests.long.soak --minutes 30 [--write PAGE]`.

It starts Valkey, a database, gunicorn, and a Celery worker with beat. One process sends requests without a pause, and
another one edits rules, makes reports, and closes, archives and verifies months. A sample is taken every ten seconds.
At the end the ledger is compared with what the clients counted. The exit status is 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support import servers
from project.demo import processes
from tests.long.soak.samples import Sample, Series, broken_promises, resident_mb
from tests.support import page_tables

#: Seconds between two samples, and minutes from the start to the moment with which the end is compared.
INTERVAL, REFERENCE = 10.0, 5.0
#: Accounts, each with one key and one connection. The last ones have a small limit, which refuses most requests.
ACCOUNTS, SMALL = 8, 2
HEADS = ("requests", "admitted", "refused", "unanswered", "5xx", "units lost", "units too many")


def _seed() -> list[tuple[str, str]]:
    """Make plans, rules, accounts and keys. Return the name of each key in the ledger, and its secret."""
    from django.contrib.auth import get_user_model

    from project.models import ApiKey
    from ratelimits.engine.keys import shard_of
    from ratelimits.engine.server import current_server
    from ratelimits.models import Account, Plan
    from tests.long.soak.operations import OLD_ACCOUNT
    from tests.support.rows import rule

    free, pro = (Plan.objects.create(name=name, slug=name) for name in ("free", "pro"))
    month: dict[str, Any] = {
        "algorithm": "calendar_window",
        "capacity": 10**9,
        "calendar_unit": "month",
        "key_kind": "api_key",
    }
    rule("requests", **month, bills=True)
    rule("tokens", **month, meter="tokens", bills=True)
    rule("burst", plan=pro, key_kind="api_key", capacity=100_000, rate=100_000, period=1)
    rule("burst", plan=free, key_kind="api_key", capacity=20, rate=10, period=1)
    rule("everyone", "fixed_window", key_kind="global", capacity=10**8, period=3600)
    shards = current_server().keyspace.shards
    # Batches of the old account can be archived only if no other account is in its shard.
    old = shard_of(f"account:{OLD_ACCOUNT}", shards)
    names = [f"soak-{number}" for number in range(100) if shard_of(f"account:soak-{number}", shards) != old]
    keys = []
    for number, name in enumerate(names[:ACCOUNTS]):
        Account.objects.create(identifier=name, plan=pro if number < ACCOUNTS - SMALL else free)
        key, secret = ApiKey.objects.issue(
            name=name, user=get_user_model().objects.create_user(username=name), account=name
        )
        keys.append((key.limit_key, secret))
    Account.objects.create(identifier=OLD_ACCOUNT)
    return keys


@contextmanager
def _helper(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run one of the other modules of this package. It ends when its standard input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.long.soak.{name}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.communicate()
        if process.returncode:
            raise SystemExit(f"tests.long.soak.{name} failed")


def _connections() -> tuple[int, int]:
    """Return the number of connections to Redis and to the database, without those of this process."""
    from django.db import connection

    from ratelimits.engine.server import current_server

    clients = current_server().wire.client.client_list()
    others = sum(one["name"] != "soak" for one in clients)
    if connection.vendor != "postgresql":
        return others, 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return others, int(cursor.fetchone()[0]) - 1


def _compare(units: list[tuple[str, str, str, int]]) -> dict[str, int]:
    """Compare the ledger with the clients' own counts, for each key and meter."""
    from django.db.models import Sum

    from ratelimits.usage.models import Line
    from tests.long.soak.operations import OLD_ACCOUNT

    counted: Counter[tuple[str, str, str]] = Counter()
    for outcome, key, meter, count in units:
        counted[outcome, key, meter] += count
    sums = Line.objects.exclude(account=OLD_ACCOUNT).values("key", "meter").annotate(units=Sum("admitted_units"))
    ledger = {(one["key"], one["meter"]): one["units"] for one in sums.order_by()}
    pairs = ledger.keys() | {(key, meter) for _outcome, key, meter in counted}
    lost = excess = 0
    for pair in pairs:
        least = counted["acknowledged", *pair]
        lost += max(least - ledger.get(pair, 0), 0)
        excess += max(ledger.get(pair, 0) - least - counted["unanswered", *pair], 0)
    return {"units lost": lost, "units too many": excess, "units in the ledger": sum(ledger.values())}


def _soak(stack: ExitStack, folder: Path, minutes: float) -> tuple[Series, dict[str, Any]]:
    keys = _seed()
    web_log, worker_log = folder / "gunicorn.log", folder / "celery.log"
    listener = stack.enter_context(processes.listening_socket(0))
    port = listener.getsockname()[1]
    web = stack.enter_context(
        processes.running(processes.gunicorn_arguments(listener), web_log, pass_fds=(listener.fileno(),))
    )
    worker = stack.enter_context(processes.running(processes.celery_arguments(folder / "schedule"), worker_log))
    processes.wait_until_up(f"http://127.0.0.1:{port}/", web, web_log)
    series = Series(min(REFERENCE, minutes / 3) * 60)
    done: dict[str, int] = {}
    line: dict[str, Any] = {}
    with (
        _helper("operations", str(folder / "archives")) as operations,
        _helper("load", str(port), str(minutes * 60), str(INTERVAL)) as load,
    ):
        assert load.stdin is not None
        assert load.stdout is not None
        print(json.dumps(keys), file=load.stdin, flush=True)
        began = time.monotonic()
        for text in load.stdout:
            line = json.loads(text)
            if line["end"] or operations.poll() is not None:
                break
            sample = Sample(
                time.monotonic() - began,
                resident_mb(web.pid),
                resident_mb(worker.pid),
                *_connections(),
                line["p99_ms"],
                line["per_second"],
            )
            series.samples.append(sample)
            print(" ".join(f"{name}={value:.1f}" for name, value in sample._asdict().items()), flush=True)
        told = operations.communicate()[0].splitlines()
        done = json.loads(told[-1]) if told else {}
    # The web server writes its last counts when it stops. The worker goes on until then.
    processes.stop(web)
    processes.stop(worker)
    return series, {"statuses": Counter(line["statuses"]), "units": line["units"], "done": done}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--database", choices=("postgres", "sqlite"), default="postgres")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables into this page")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratelimits-soak-")))
        redis_server = stack.enter_context(servers.redis_server(None))
        url = stack.enter_context(servers.database(options.database))
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "REDIS_URL": redis_server.url,
            "DATABASE_URL": url,
            "DEMO_DATA_DIR": str(folder),
            "RATELIMITS_NAMESPACE": "soak",
            # A slow moment of a busy machine should be seen in the p99, and not start the failure policy.
            "RATELIMITS_TIMEOUT": "10",
        }
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        with ExitStack() as running:
            series, run = _soak(running, folder, options.minutes)
        call_command("ratelimits_seal")
        call_command("ratelimits_drain")
        counts = _compare(run["units"])
        for log in ("gunicorn.log", "celery.log"):
            text = (folder / log).read_text(errors="replace")
            print(f"{log}: {text.count('Traceback')} tracebacks, {text.count('WARNING')} warnings")
    statuses: Counter[str] = run["statuses"]
    counts["errors"] = sum(count for status, count in statuses.items() if status not in ("200", "429", "unanswered"))
    cells = [statuses.total(), statuses["200"], statuses["429"], statuses["unanswered"], counts["errors"]]
    cells += [counts["units lost"], counts["units too many"]]
    for row in (series.heads(), *series.cells()):
        print("{:44} {:>12} {:>12} {:>12} {:>16}".format(*row))
    print(", ".join(f"{name}: {cell:,}" for name, cell in zip(HEADS, cells, strict=True)))
    print(", ".join(f"{name}: {count:,}" for name, count in run["done"].items()))
    broken = broken_promises(series, counts)
    print("\n".join(f"NOT as promised: {one}" for one in broken) or "all as promised")
    if options.write:
        page_tables.write(options.write, "soak", series.heads(), series.cells())
        rows = [*zip(HEADS, cells, strict=True), *run["done"].items()]
        page_tables.write(
            options.write, "soak_counts", [name for name, _count in rows], [[f"{count:,}" for _name, count in rows]]
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
