"""Share one server between all processes of a project on this machine, for development.

The first process that needs the server starts the keeper: a process that starts the server, and later stops it. Each
process that uses the server holds a shared lock on the file `users`. The system releases this lock when the process
ends, also after a crash. The keeper stops the server LINGER seconds after the last of these processes has ended.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from ratelimits.embedded import LOG_CHARACTERS, START_SECONDS, EmbeddedServer, ServerStartError, answers, valkey_binary

#: Seconds for which the server continues to run after the last process that used it has ended. A web server that
#: reloads its code starts again sooner than this, so it finds the server still running.
LINGER = 60.0
#: Seconds between two checks whether a process uses the server.
_CHECK_INTERVAL = 1.0
#: The advice for a project that does not want to install the server.
_OTHERWISE = (
    "add an alias with BACKEND 'django_redis.cache.RedisCache' to CACHES, and name it in RATELIMITS['CACHE_ALIAS']"
)


@cache
def shared_url(directory: Path) -> str:
    """Return the URL of the server whose data is in `directory`. Start the server if it does not run.

    Raise ServerStartError if it does not start.
    """
    valkey_binary(_OTHERWISE)  # raises an error if the server is not installed
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".gitignore").write_text("*\n")
    with _locked(directory / "start"):
        # Keep the descriptor, and with it the lock, until the process ends. A forked child has the descriptor too.
        fcntl.flock(os.open(directory / "users", os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)
        port = _running(directory) or _start(directory)
    return f"redis://127.0.0.1:{port}/0"


@cache
def own_url() -> str:
    """Start a server for this process alone, for example for a test run. Return the URL of the server.

    When the process ends, the server stops and its data is deleted.
    """
    binary = valkey_binary("start the server whose address is in CACHES")
    directory = Path(tempfile.mkdtemp(prefix="ratelimits-"))
    server = EmbeddedServer(directory, aof=True, binary=binary)
    owner = os.getpid()

    def stop() -> None:
        if os.getpid() == owner:  # not in a forked child
            server.stop()
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(stop)
    return server.url


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on a file within the block."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _running(directory: Path) -> int | None:
    """Return the port of the running server, or None."""
    state = _state(directory)
    return state["port"] if state and answers(state["port"], state["pid"]) else None


def _state(directory: Path) -> dict[str, Any]:
    """Return the port and the process id of the server that was started last; {} if there was none."""
    with suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads((directory / "server.json").read_text())
        return state
    return {}


def _start(directory: Path) -> int:
    """Start the keeper, wait until the server answers, and return its port."""
    log = directory / "keeper.log"
    # The folder that contains the package `ratelimits`, so that the keeper can import it.
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "ratelimits.embedded.shared", str(directory)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal must not stop the server of other processes.
        )
    deadline = time.monotonic() + START_SECONDS
    while (port := _running(directory)) is None:
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise ServerStartError(
                f"The embedded server did not start:\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}"
            )
        time.sleep(0.02)
    keeper.returncode = 0  # The keeper runs longer than this process. Without this line, Python would warn of this.
    return port


def _is_used(directory: Path) -> bool:
    """Return whether a process uses the server."""
    with (directory / "users").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _started(directory: Path) -> EmbeddedServer:
    """Start the server, if possible on its former port, because other processes can still have this address."""
    port = _state(directory).get("port", 0)
    with suppress(ServerStartError):
        return EmbeddedServer(directory, port=port, aof=True)
    return EmbeddedServer(directory, aof=True)


def keep(directory: Path, linger: float = LINGER) -> None:
    """Start the server, and stop it when no process has used it for `linger` seconds."""
    server = _started(directory)
    try:
        written = directory / "server.json.new"
        written.write_text(json.dumps({"port": server.port, "pid": server.process.pid}))
        written.replace(directory / "server.json")
        used_at = time.monotonic()
        while server.process.poll() is None:
            time.sleep(_CHECK_INTERVAL)
            if _is_used(directory):
                used_at = time.monotonic()
            elif time.monotonic() - used_at >= linger:
                with _locked(directory / "start"):  # within this block, no process can begin to use the server
                    if not _is_used(directory):
                        server.stop()
    finally:
        server.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keep(Path(sys.argv[1]), float(os.environ.get("RATELIMITS_EMBEDDED_LINGER", LINGER)))
