"""Let several Celery workers run tasks that share one limit. Kill some of the workers meanwhile, if --kills is given.

    python -m benchmarks.waiting.tasks [--workers 4] [--tasks 1000] [--rate 50] [--out DIR]
    python -m benchmarks.waiting.tasks --kills 10 --tasks 500

The broker is the embedded server, and the limit is a GCRA of capacity 1. The "granted" time of a task is the moment at
which Redis allows the task to run, by the server's clock. The time from the first granted moment to the end of the last
task is compared with the ideal time, (tasks - 1) / rate. With --kills, workers are killed (SIGKILL) and started again.
Celery delivers their tasks again after --visibility seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.support import report, servers

#: Promises: the largest ratio of the time to the ideal time, and the largest number of broker messages per task.
MAX_TIME, MAX_MESSAGES = 1.03, 2.1
#: Maximum number of seconds without progress. Afterwards the run fails.
STALL_SECONDS = 120


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting.tasks", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="workers that share the limit")
    parser.add_argument("--concurrency", type=int, default=4, help="processes of each worker")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks of all workers together")
    parser.add_argument("--rate", type=int, default=50, help="tasks per second")
    parser.add_argument("--kills", type=int, default=0, help="how many times a worker is killed")
    parser.add_argument(
        "--visibility", type=float, default=60, help="seconds until a killed worker's tasks are delivered again"
    )
    parser.add_argument("--away", type=float, default=0, help="seconds until a killed worker is started again")
    parser.add_argument("--seed", type=int, default=20261, help="chooses the workers that are killed")
    parser.add_argument("--out", type=Path, help="directory for the run's JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    with servers.redis_server(None) as redis_server, servers.database("sqlite") as url:
        servers.start_django(servers.environment(redis_server, url))
        os.environ["BENCHMARK_VISIBILITY"] = str(options.visibility)
        machine_info = report.machine(redis_server.url, ("celery", "kombu"))
        results = measure(options)
    which = f"workers killed: {options.kills}"
    claims = [
        report.Claim(
            f"{which}: most tasks granted in any second (limit {options.rate})", options.rate, results["most_granted"]
        ),
        report.Claim(f"{which}: retries used", 0, results["retries"]),
        report.Claim(f"{which}: tasks lost", 0, results["lost"]),
    ]
    if not options.kills:
        claims += [
            report.Claim(f"{options.tasks:,} tasks: time ÷ ideal time", MAX_TIME, results["times_ideal"]),
            report.Claim("broker messages per task", MAX_MESSAGES, results["messages_per_task"]),
        ]
    machine_info |= {"load_after": report.load()}
    name = "waiting.kills" if options.kills else "waiting.tasks"
    run = report.run_json(name, machine_info, vars(options), claims, results=results)
    print(text_of(run))
    report.write(run, options.out)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Send the tasks, run the workers until every task has run, and return the figures of the run."""
    from benchmarks.waiting import worker
    from ratelimits.models import Rule

    Rule.objects.create(
        name="crm", scope="crm-sync", algorithm="gcra", key_kind="global", capacity=1, rate=options.rate, period=1
    )
    store = worker.results
    workers = [_start(number, options.concurrency) for number in range(options.workers)]
    try:
        _wait_for_workers(worker.app, options.workers)
        for number in range(options.tasks):
            worker.sync.delay(number)
        _kill(workers, options)
        runs = _runs(store, options.tasks)
    finally:
        for process in workers:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return summary(runs, int(store.get(worker.MESSAGES) or 0), options)


def _start(number: int, concurrency: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.waiting.worker", "worker", "-l", "warning"]
    command += ["--concurrency", str(concurrency), "-n", f"worker{number}@%h", "--without-gossip", "--without-mingle"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def _wait_for_workers(app: Any, count: int) -> None:
    deadline = time.monotonic() + STALL_SECONDS
    while len(app.control.ping(timeout=0.5)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("the workers do not start")


def _kill(workers: list[subprocess.Popen[bytes]], options: argparse.Namespace) -> None:
    """Kill workers while tasks run, and start them again."""
    from benchmarks.waiting.worker import RUNS, results

    draw = random.Random(options.seed)
    for kill in range(options.kills):
        # The first half of the tasks is divided into `kills` + 1 parts. Each kill happens at a random task of its part,
        # and the last part has no kill.
        ran = options.tasks * (kill + draw.random()) / (options.kills + 1) / 2
        while results.llen(RUNS) < ran:
            time.sleep(0.05)
        number = draw.randrange(len(workers))
        broker = redis.Redis.from_url(f"{os.environ['BENCHMARK_REDIS_URL']}/3")
        _stop_when_noted(workers, broker)
        # While the killed worker's connection is open, the server can still give it a message, which would be lost. So
        # the other workers send nothing until this connection is closed.
        killed = _processes([workers[number]])
        os.killpg(workers[number].pid, signal.SIGKILL)
        _await(killed, psutil.STATUS_ZOMBIE)
        workers[number].wait()
        _await_turns(broker)
        _signal([worker for worker in workers if worker is not workers[number]], signal.SIGCONT)
        time.sleep(options.away)
        workers[number] = _start(number, options.concurrency)


def _stop_when_noted(workers: list[subprocess.Popen[bytes]], broker: redis.Redis) -> None:
    """Stop all workers (SIGSTOP) at a moment at which Celery has noted the newest message of each task.

    With Redis as its broker, Celery takes a message from the queue in one step, and notes the message in Redis in a
    second step. If a worker is killed between the two steps, the message is lost, whatever its task is. Much time can
    pass between the two steps if the worker works on other messages meanwhile. This benchmark measures QuotaTask, so it
    must not kill a worker between the two steps.

    A task that is sent again has two messages until the first is acknowledged, so its id does not say which is noted.
    """
    from benchmarks.waiting.worker import FINISHED, NEWEST, results

    deadline = time.monotonic() + STALL_SECONDS
    while time.monotonic() < deadline:
        _stop(workers, broker)
        queued: Any = broker.lrange("celery", 0, -1)
        unacked: Any = broker.hvals("unacked")
        finished: Any = results.smembers(FINISHED)
        newest: Any = results.hgetall(NEWEST)
        # A noted message is a JSON list whose first item is the message.
        messages = [json.loads(item) for item in queued] + [json.loads(item)[0] for item in unacked]
        noted = {message["headers"]["message"] for message in messages}
        if all(message.decode() in noted for task_id, message in newest.items() if task_id not in finished):
            return
        _signal(workers, signal.SIGCONT)
        time.sleep(0.05)
    raise TimeoutError("a worker keeps a message that is not noted")


def _stop(workers: list[subprocess.Popen[bytes]], broker: redis.Redis) -> None:
    """Stop all workers (SIGSTOP), and wait until the server has carried out everything that they had sent."""
    _signal(workers, signal.SIGSTOP)
    _await(_processes(workers), psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    _await_turns(broker)


def _processes(workers: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    """Return the processes of the workers, and all their child processes."""
    parents = [psutil.Process(worker.pid) for worker in workers]
    return [*parents, *(child for parent in parents for child in parent.children(recursive=True))]


def _await(processes: list[psutil.Process], *statuses: str) -> None:
    """Wait until each process has one of these statuses, or is gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            while process.status() not in statuses:
                time.sleep(0.001)  # no event says that a process has stopped or ended


def _await_turns(broker: redis.Redis) -> None:
    """Wait until the server has read all that connections sent before, and has noticed which of them were closed."""
    # In each turn of its loop, the server reads what was sent before the turn. Each ping takes at least one turn.
    for _turn in range(3):
        broker.ping()


def _signal(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in workers:
        os.killpg(process.pid, number)


def _runs(store: redis.Redis, tasks: int) -> list[dict[str, Any]]:
    """Return all runs when each task has run, or after STALL_SECONDS without a new run."""
    from benchmarks.waiting.worker import RUNS

    count, since = 0, time.monotonic()
    while True:
        items: Any = store.lrange(RUNS, 0, -1)
        runs = [json.loads(item) for item in items]
        if len({run["number"] for run in runs}) == tasks:
            return runs
        if len(runs) > count:
            count, since = len(runs), time.monotonic()
        if time.monotonic() - since > STALL_SECONDS:
            return runs
        time.sleep(0.1)


def summary(runs: list[dict[str, Any]], messages: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the runs."""
    granted = sorted(run["granted"] for run in runs)
    ran = sorted(run["ran"] for run in runs)
    different = len({run["number"] for run in runs})  # tasks that have run
    seconds = (ran[-1] - granted[0]) / 1e6  # both moments are in µs
    ideal = (options.tasks - 1) / options.rate
    return {
        "tasks": options.tasks,
        "lost": options.tasks - different,
        "run_twice": len(runs) - different,
        # A task that ran twice has the same granted moment in both runs.
        "most_granted": most_in_a_second(sorted({run["granted"] for run in runs})),
        "most_ran": most_in_a_second(ran),
        "seconds": round(seconds, 3),
        "ideal_seconds": round(ideal, 3),
        "times_ideal": round(seconds / ideal, 4),
        "messages_per_task": round(messages / options.tasks, 3),
        "retries": max(run["retries"] for run in runs),
        "kills": options.kills,
    }


def most_in_a_second(moments: Sequence[int]) -> int:
    """Return the largest number of moments that lie within less than one second. `moments` are sorted, in µs."""
    return max(bisect_left(moments, moment + 1_000_000) - number for number, moment in enumerate(moments))


def text_of(run: dict[str, Any]) -> str:
    """Return the tables for the terminal."""
    rows = [(name.replace("_", " "), value) for name, value in run["results"].items()]
    return "\n".join([report.table(("tasks that share one limit", ""), rows), "", report.claims_table(run["claims"])])


if __name__ == "__main__":
    raise SystemExit(main())
