"""Start and stop the processes of the demo.

Each process is started in its own session of the operating system. So Ctrl-C reaches only the demo itself, and the
demo can stop the other processes in the right order.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ratelimits.embedded import die_with_parent

#: The function `stop` kills a process that has not ended after this number of seconds.
STOP_SECONDS = 15.0
#: Seconds after which a process that has ended is started again.
RESTART_SECONDS = 1.0


class DemoError(RuntimeError):
    """Raised if the demo cannot run. The message is for the person who started the demo."""


@contextmanager
def only_demo_in(directory: Path) -> Iterator[None]:
    """Lock this directory. Raise DemoError if another demo runs in it: both would write the same files."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DemoError(
                f"Another demo runs in {directory}: end that demo, or set DEMO_DATA_DIR to another directory."
            ) from error
        yield


def listening_socket(port: int) -> socket.socket:
    """Return a listening socket. Raise DemoError if the port is in use.

    The web server inherits this socket. So no other process can take the port before the web server starts.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        raise DemoError(f"Port {port} is in use: choose another port with --port, or 0 for a free port.") from error
    listener.listen(512)
    return listener


def gunicorn_arguments(listener: socket.socket) -> list[str]:
    """Return the arguments of gunicorn. The web server inherits the socket `listener`."""
    return [
        *("gunicorn", "project.wsgi", "--bind", f"fd://{listener.fileno()}", "--workers", "2", "--preload"),
        *("--threads", "4", "--keep-alive", "60", "--no-control-socket"),
    ]


def celery_arguments(schedule: Path) -> list[str]:
    """Return the arguments of the Celery worker with beat. Beat stores its schedule in the file `schedule`."""
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
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m <arguments>`, and write its output to `log`. `popen` starts the process.

    At the end of the block, stop this process and all processes that it started.
    """
    with log.open("ab") as output:
        process = popen(
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


@contextmanager
def kept_running(arguments: list[str], log: Path, restarted: Callable[[], object]) -> Iterator[None]:
    """Run `python -m <arguments>` within the block, and start it again whenever it ends, as a supervisor does.

    Call `restarted` each time that the process has ended by itself. For example, a Celery worker ends if its broker
    is killed while a task runs.
    """
    ended = threading.Event()

    def keep() -> None:
        # This thread outlives each process: a process gets SIGTERM when the thread that started it ends.
        while True:
            with running(arguments, log) as process:
                while process.poll() is None and not ended.wait(0.2):
                    pass
            if ended.is_set():
                return
            restarted()
            ended.wait(RESTART_SECONDS)

    keeper = threading.Thread(target=keep, name="demo-keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and wait at most STOP_SECONDS. Then kill the processes of its session that still run."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 30.0) -> None:
    """Wait until the URL gives a response, with any status.

    Raise DemoError after `seconds` without a response, or if the process ends before the first response.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310  (our own http address)
                return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise DemoError(f"No response from {url}. The end of {log}:\n{log.read_text(errors='replace')[-2000:]}")
