"""Run the demo: make the rows, start the processes, send requests, and compare the counts with the ledger."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from django.conf import settings
from django.core.management import call_command
from rich.console import Console

from project.demo import compare, processes, seed
from project.demo.opening import STAFF, Opening, Options
from project.demo.progress import step
from project.demo.traffic import Client, ClientCounts, Traffic

#: Maximum time until the worker has written all usage to the ledger.
LEDGER_SECONDS = 60.0


def run_demo(console: Console, options: Options, opening: Opening) -> int:
    """Run the demo on the servers of REDIS_URL and DATABASE_URL. Return the exit status."""
    started = time.monotonic()
    with step(console, "Making the tables"):
        call_command("migrate", verbosity=0)
    with step(console, "Writing the rules, the plans and the API keys"):
        seed.seed_staff(opening.password)
        seed.seed_rules()
        keys = seed.seed_keys()
    with step(console, "Making a customer whose last month is over, with its report"):
        seed.seed_finished_month()
    with ExitStack() as stack:
        console.print(f"The web server and the worker use {settings.REDIS_URL}", soft_wrap=True)
        with step(console, "Starting a web server and a Celery worker with beat"):
            web = _start_web_server(stack, opening)
            _keep_worker_running(stack, console)
        # The stack leaves this context first, because it is entered last. After this, no signal can interrupt the stack
        # while it stops the processes.
        stack.enter_context(_ignore_signals_at_the_end())
        client_counts = _send(console, opening, keys, options)
        with step(console, "Waiting until the worker has written the usage to the ledger"):
            compare.wait_for_ledger(keys, LEDGER_SECONDS)
        with step(console, "Comparing the counts of the clients with the ledger"):
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
        _print_addresses(console, opening, keys)
        return _stay_up(console, web)


@contextmanager
def _ignore_signals_at_the_end() -> Iterator[None]:
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start_web_server(stack: ExitStack, opening: Opening) -> subprocess.Popen[bytes]:
    listener = stack.enter_context(opening.listener)
    log = settings.DATA_DIR / "gunicorn.log"
    web = stack.enter_context(
        processes.running(processes.gunicorn_arguments(listener), log, pass_fds=(listener.fileno(),))
    )
    processes.wait_until_up(f"{opening.address}/", web, log)
    return web


def _keep_worker_running(stack: ExitStack, console: Console) -> None:
    log = settings.DATA_DIR / "celery.log"
    arguments = processes.celery_arguments(settings.DATA_DIR / "celerybeat-schedule")
    text = f"[yellow]The Celery worker has ended, so it is started again. Its log is {log}."
    stack.enter_context(processes.kept_running(arguments, log, lambda: console.print(text, soft_wrap=True)))


def _send(console: Console, opening: Opening, keys: list[seed.IssuedKey], options: Options) -> dict[str, ClientCounts]:
    clients = [Client(key.key, key.secret) for key in keys]
    port = opening.listener.getsockname()[1]
    traffic = Traffic(port, clients, options.requests, threads=options.clients)
    with step(console, "Sending requests", options.requests) as advance:
        return traffic.run(advance)


def _print_addresses(console: Console, opening: Opening, keys: list[seed.IssuedKey]) -> None:
    address = opening.address
    console.print(
        f"Admin:  {address}/admin/  (user [bold]{STAFF}[/], password [bold]{opening.password}[/])", soft_wrap=True
    )
    console.print("Send a request with one of the API keys, and see how much of the quota is left:")
    for key in keys:
        console.print(f"  {_curl(key)} -i {address}/api/time/  # {key.name} ({key.plan})", soft_wrap=True)
    console.print(f"  {_curl(keys[0])} {address}/usage/", soft_wrap=True)
    console.print("Press Ctrl-C to end the demo.")


def _curl(key: seed.IssuedKey) -> str:
    return f"curl -H 'Authorization: Api-Key {key.secret}'"


def _stay_up(console: Console, web: subprocess.Popen[bytes]) -> int:
    """Wait until the web server ends. Return 1, the exit status for a failure."""
    while web.poll() is None:
        time.sleep(0.5)
    console.print(f"[red]The web server has stopped. Its log is in {settings.DATA_DIR}.")
    return 1
