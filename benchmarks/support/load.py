"""Make load on a web server: with wrk if wrk is installed, otherwise with clients in another Python process."""

from __future__ import annotations

import re
import selectors
import shutil
import socket
import subprocess
import sys
import time


def generator() -> str:
    """Return what makes the load: "wrk" or "python"."""
    return "wrk" if shutil.which("wrk") else "python"


def requests_per_second(port: int, path: str, core: int, connections: int, seconds: float) -> float:
    """Return the requests per second that a server answers. All connections send requests at the same time.

    The process that makes the load runs on the core `core`.
    """
    if generator() == "wrk":
        whole = max(round(seconds), 1)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{whole}s", f"http://127.0.0.1:{port}{path}"]
    else:
        command = [sys.executable, "-m", "benchmarks.support.load", str(port), path, str(connections), str(seconds)]
    done = subprocess.run(["taskset", "-c", str(core), *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr or done.stdout}")
    failed = re.search(r"(Non-2xx.*|Socket errors.*)", done.stdout)
    if failed:
        raise SystemExit(f"{path}: {failed[1]}")
    found = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


class _Client:
    """One connection. It sends a request, reads the whole response, and sends the next request.

    If the server closes the connection, the client opens a new one.
    """

    def __init__(self, port: int, request: bytes, selector: selectors.BaseSelector) -> None:
        self._port, self._request, self._selector = port, request, selector
        self._open()

    def _open(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port))
        self._buffer = b""
        self._selector.register(self._socket, selectors.EVENT_READ, self)
        self._socket.sendall(self._request)

    def _answered(self, ended: bool) -> bool:
        """Return whether the response is complete. `ended`: the server has closed the connection."""
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
            raise SystemExit(f"answered {head.splitlines()[0].decode()}")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if length is not None:
            return len(body) >= int(length[1])
        # Without a length, the body ends with the connection or, if it is sent in chunks, with an empty chunk.
        return ended or body.endswith(b"0\r\n\r\n")

    def read(self) -> int:
        """Read the bytes that have arrived.

        If the response is complete, send the next request and return 1, otherwise return 0.
        """
        piece = self._socket.recv(65536)
        self._buffer += piece
        answered = self._answered(not piece)
        if not piece or (answered and b"\r\nconnection: close" in self._buffer.lower()):
            self.close()
            self._open()
        elif answered:
            self._buffer = b""
            self._socket.sendall(self._request)
        return int(answered)

    def close(self) -> None:
        self._selector.unregister(self._socket)
        self._socket.close()


def main(port: int, path: str, connections: int, seconds: float) -> None:
    """Print the requests per second, in the form of wrk."""
    selector = selectors.DefaultSelector()
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    clients = [_Client(port, request, selector) for _ in range(connections)]
    count, start = 0, time.perf_counter()
    end = start + seconds
    while time.perf_counter() < end:
        for key, _events in selector.select(0.1):
            count += key.data.read()
    elapsed = time.perf_counter() - start
    for client in clients:
        client.close()
    print(f"Requests/sec: {count / elapsed:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
