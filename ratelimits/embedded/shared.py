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
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ratelimits.embedded import (
    LOG_CHARACTERS,
    START_SECONDS,
    EmbeddedServer,
    ServerStartError,
    answers,
    make_private,
    new_socket,
    socket_url,
    valkey_binary,
)

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
    make_private(directory)
    with _open(directory / ".gitignore", os.O_TRUNC) as file:
        file.write(b"*\n")
    with _locked(directory / "start"):
        # Keep the descriptor, and with it the lock, until the process ends. A forked child has the descriptor too.
        fcntl.flock(os.open(directory / "users", os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)
        return socket_url(_running(directory) or _start(directory))


def broker_url(directory: Path) -> str:
    """Return the URL of database 1 of the same server, as Celery writes it. Raise ServerStartError."""
    path = urlsplit(shared_url(directory)).path
    return f"redis+socket://{path}?virtual_host=1"


@cache
def own_url() -> str:
    """Start a server for this process alone, for example for a test run. Return the URL of the server.

    When the process ends, the server stops and its data is deleted.
    """
    binary = valkey_binary("start the server whose address is in CACHES")
    path = new_socket()
    directory = path.parent
    server = EmbeddedServer(directory, path=path, aof=True, binary=binary)
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
    with _open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(path: Path, more_flags: int = 0) -> BinaryIO:
    """Open a file. If it is new, only this user can read it."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | more_flags, 0o600), "r+b")


def _running(directory: Path) -> Path | None:
    """Return the socket of the running server, or None."""
    state = _state(directory)
    return Path(state["path"]) if state and answers(Path(state["path"]), state["pid"]) else None


def _state(directory: Path) -> dict[str, Any]:
    """Return the socket's path and the process id of the server that was started last; {} if there was none."""
    with suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads((directory / "server.json").read_text())
        return state if "path" in state else {}
    return {}


def _start(directory: Path) -> Path:
    """Start the keeper, wait until the server answers, and return its socket."""
    log = directory / "keeper.log"
    # The folder that contains the package `ratelimits`, so that the keeper can import it.
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with _open(log, os.O_TRUNC) as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "ratelimits.embedded.shared", str(directory)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            umask=0o077,
            start_new_session=True,  # Ctrl-C in a terminal must not stop the server of other processes.
        )
    deadline = time.monotonic() + START_SECONDS
    while (path := _running(directory)) is None:
        if keeper.poll() is not None or time.monotonic() > deadline:
            raise ServerStartError(
                f"The embedded server did not start:\n{log.read_text(errors='replace')[-LOG_CHARACTERS:]}"
            )
        time.sleep(0.02)
    keeper.returncode = 0  # The keeper runs longer than this process. Without this line, Python would warn of this.
    return path


def _is_used(directory: Path) -> bool:
    """Return whether a process uses the server."""
    with _open(directory / "users") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _socket(directory: Path) -> Path:
    """Return the path of the server's socket: the former one if it is safe, because processes can still have it."""
    former = Path(_state(directory).get("path", ""))
    with suppress(OSError):
        folder = former.parent.lstat()
        if former.name == "server.sock" and stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.getuid():
            former.parent.chmod(0o700)
            return former
    return new_socket()


def keep(directory: Path, linger: float = LINGER) -> None:
    """Start the server, and stop it when no process has used it for `linger` seconds."""
    server = EmbeddedServer(directory, path=_socket(directory), aof=True)
    assert server.path is not None
    try:
        written = directory / "server.json.new"
        written.write_text(json.dumps({"path": str(server.path), "pid": server.process.pid}))
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
        shutil.rmtree(server.path.parent, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keep(Path(sys.argv[1]), float(os.environ.get("RATELIMITS_EMBEDDED_LINGER", LINGER)))
