"""The processes of the demo.

Each has its own session, so that Ctrl-C reaches only the demo itself, which stops them in order.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ratelimits.embedded import die_with_parent

STOP_SECONDS = 15.0


class DemoError(RuntimeError):
    """The demo cannot run. The message is for the person who started it."""


@contextmanager
def only_demo_in(directory: Path) -> Iterator[None]:
    """Raise DemoError if another demo runs in this directory, since both would write the same files."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DemoError(f"Another demo runs in {directory}: end it, or set DEMO_DATA_DIR.") from error
        yield


def listening_socket(port: int) -> socket.socket:
    """Return a listening socket that the web server inherits, so that no other process can take the port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise DemoError(f"Port {port} is taken: choose another one with --port, or 0 for a free one.") from error
    listener.listen(512)
    return listener


def gunicorn_arguments(listener: socket.socket) -> list[str]:
    """Return the arguments of the web server: an inherited socket, two workers with four threads, preloaded."""
    return [
        *("gunicorn", "project.wsgi", "--bind", f"fd://{listener.fileno()}", "--workers", "2", "--preload"),
        *("--threads", "4", "--keep-alive", "60", "--no-control-socket"),
    ]


def celery_arguments(schedule: Path) -> list[str]:
    """Return the arguments of the Celery worker with beat, whose schedule is in a file."""
    return [
        *("celery", "-A", "project", "worker", "--beat", "--loglevel", "info", "--concurrency", "2"),
        *("--schedule", str(schedule)),
    ]


@contextmanager
def running(
    arguments: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m …` with its output in `log`.

    At the end of the block, stop it and all processes that it started.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end. After some seconds, kill the processes of its session that are left."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 30.0) -> None:
    """Wait for the first response, with any status. Raise DemoError with the end of the log if there is none."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310  (our own http address)
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise DemoError(f"No answer from {url}; the end of {log}:\n{log.read_text(errors='replace')[-2000:]}")
