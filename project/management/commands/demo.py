from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console

from project.demo.opening import Opening, Options, announced, inherited, take_turn, variables
from project.demo.processes import DemoError, only_demo_in
from project.demo.progress import step
from project.demo.run import run_demo
from ratelimits.embedded import EmbeddedServer, ServerStartError, die_with_parent, new_socket


class Command(BaseCommand):
    help = (
        "Starts a web server, a Celery worker and HTTP clients on this machine. Also starts Valkey, if the "
        "environment variable REDIS_URL is not set. Then compares the clients' counts with the usage ledger, and "
        "prints the report."
    )

    # Django must not run the system checks by itself: `handle` runs them, but only in the process that runs the demo,
    # and not in the process that starts Valkey.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="end after the report, with status 1 if a count differs"
        )
        parser.add_argument("--requests", type=int, default=6_000, help="number of requests (default 6000)")
        parser.add_argument(
            "--clients", type=int, default=8, help="number of clients that send at the same time (default 8)"
        )
        parser.add_argument("--port", type=int, default=0, help="port of the web server (default: a free port)")
        parser.add_argument(
            "--redis-port", type=int, default=0, help="port of Valkey, which has no password (default: a Unix socket)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        signal.signal(signal.SIGTERM, _interrupt)
        console = Console()
        chosen = Options(**{name: options[name] for name in ("once", "requests", "clients")})
        try:
            if (handed := inherited()) is not None:
                opening, turn = handed
                self.check()
                take_turn(turn)
                status = run_demo(console, chosen, opening)
            elif "REDIS_URL" in os.environ:
                opening = announced(console, chosen, options["port"])
                with step(console, "Checking the settings"):
                    self.check()
                status = run_demo(console, chosen, opening)
            else:
                with only_demo_in(settings.DATA_DIR):
                    opening = announced(console, chosen, options["port"])
                    status = _run_on_embedded_server(console, opening, options["redis_port"])
        except (DemoError, ServerStartError) as error:
            raise CommandError(str(error)) from error
        except KeyboardInterrupt:
            status = 130  # The usual exit status after Ctrl-C: 128 + SIGINT.
        if status:
            sys.exit(status)


def _run_on_embedded_server(console: Console, opening: Opening, port: int) -> int:
    """Start Valkey. Run this command again in another process, with Valkey's address. Stop Valkey at the end."""
    with ExitStack() as stack:
        with step(console, "Starting Valkey"):
            path = None if port else new_socket()
            if path is not None:
                stack.callback(shutil.rmtree, path.parent, ignore_errors=True)
            server = EmbeddedServer(settings.DATA_DIR / "valkey", port=port, path=path, aof=True)
            stack.callback(server.stop)
        own, turn = socket.socketpair()
        child = subprocess.Popen(
            [sys.executable, *sys.argv],
            # The recorder records all requests, so that rules can be tried on them.
            env={"RATELIMITS_RECORD_SAMPLE": "1", **os.environ, "REDIS_URL": server.url, **variables(opening, turn)},
            pass_fds=(opening.listener.fileno(), turn.fileno()),
            preexec_fn=die_with_parent,
        )
        try:
            turn.close()
            opening.listener.close()
            with own, step(console, "Loading the project"):
                own.recv(1)  # Returns when the child is ready to print (see take_turn), or has ended.
            return child.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # Ctrl-C also reaches the child process, but SIGTERM reaches only this process.
            child.terminate()
            return child.wait()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
