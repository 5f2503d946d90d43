"""Run the demo: make the rows, start the processes, send requests, and compare the counts with the ledger."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from django.conf import settings
from django.core.management import call_command
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from project.demo import compare, processes, seed
from project.demo.traffic import Client, ClientCounts, Traffic

#: Maximum time until the worker has written all usage to the ledger.
LEDGER_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """The options of the command `demo`."""

    once: bool
    requests: int
    clients: int
    port: int


def run_demo(options: Options) -> int:
    """Run the demo on the servers of REDIS_URL and DATABASE_URL. Return the exit status."""
    console = Console()
    started = time.monotonic()
    call_command("migrate", verbosity=0)
    password = seed.seed_staff()
    seed.seed_rules()
    keys = seed.seed_keys()
    with ExitStack() as stack:
        web, port = _start_web_server(stack, options.port)
        worker = _start_worker(stack)
        # The stack leaves this context first, because it is entered last. After this, no signal can interrupt the stack
        # while it stops the processes.
        stack.enter_context(_ignore_signals_at_the_end())
        address = f"http://127.0.0.1:{port}"
        console.print(f"Started a web server at {address} and a Celery worker with beat. Both use {settings.REDIS_URL}")
        client_counts = _send(console, port, keys, options)
        with console.status("Waiting until the worker has written the usage to the ledger"):
            compare.wait_for_ledger(keys, LEDGER_SECONDS)
        rows = compare.compare(keys, client_counts)
        console.print(compare.table(rows))
        difference = sum(row.difference for row in rows)
        console.rule("Usage report")
        call_command("ratelimits_report", period=datetime.now(UTC).strftime("%Y-%m"), format="table")
        console.rule()
        seconds = time.monotonic() - started
        console.print(f"[bold]Difference over all keys: {difference}[/] (after {seconds:.0f} s)")
        if options.once:
            return 1 if difference else 0
        _print_addresses(console, address, password, keys)
        return _stay_up(console, {"web server": web, "Celery worker": worker})


@contextmanager
def _ignore_signals_at_the_end() -> Iterator[None]:
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start_web_server(stack: ExitStack, port: int) -> tuple[subprocess.Popen[bytes], int]:
    listener = stack.enter_context(processes.listening_socket(port))
    port = listener.getsockname()[1]
    log = settings.DATA_DIR / "gunicorn.log"
    web = stack.enter_context(
        processes.running(processes.gunicorn_arguments(listener), log, pass_fds=(listener.fileno(),))
    )
    processes.wait_until_up(f"http://127.0.0.1:{port}/", web, log)
    return web, port


def _start_worker(stack: ExitStack) -> subprocess.Popen[bytes]:
    return stack.enter_context(
        processes.running(
            processes.celery_arguments(settings.DATA_DIR / "celerybeat-schedule"),
            settings.DATA_DIR / "celery.log",
        )
    )


def _send(console: Console, port: int, keys: list[seed.IssuedKey], options: Options) -> dict[str, ClientCounts]:
    clients = [Client(key.key, key.secret) for key in keys]
    traffic = Traffic(port, clients, options.requests, threads=options.clients)
    columns = (TextColumn("Sending requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("requests", total=options.requests)
        return traffic.run(lambda: progress.advance(bar))


def _print_addresses(console: Console, address: str, password: str, keys: list[seed.IssuedKey]) -> None:
    console.print(f"Admin:  {address}/admin/  (user [bold]{seed.STAFF}[/], password [bold]{password}[/])")
    console.print("Send a request with one of the API keys, and see how much of the quota is left:")
    for key in keys:
        console.print(f"  {_curl(key)} -i {address}/api/time/  # {key.name} ({key.plan})", soft_wrap=True)
    console.print(f"  {_curl(keys[0])} {address}/usage/", soft_wrap=True)
    console.print("Press Ctrl-C to end the demo.")


def _curl(key: seed.IssuedKey) -> str:
    return f"curl -H 'Authorization: Api-Key {key.secret}'"


def _stay_up(console: Console, watched: dict[str, subprocess.Popen[bytes]]) -> int:
    """Wait until one of these processes ends. Return 1, the exit status for a failure."""
    while True:
        for name, process in watched.items():
            if process.poll() is not None:
                console.print(f"[red]The {name} has stopped. Its log is in {settings.DATA_DIR}.")
                return 1
        time.sleep(0.5)
