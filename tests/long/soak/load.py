"""Send requests to a web server without a pause: `python -m tests.long.soak.load PORT SECONDS INTERVAL`.

Standard input has a line of JSON: a list of API keys, each a pair of its name in the ledger and its secret. A
connection sends the requests of one key. One request of four sends a text, whose words cost tokens. Every INTERVAL
seconds, and at the end, the process writes a line of JSON: what happened since the line before, and all counts so far.
It ends after SECONDS, or when its standard input ends.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections import Counter
from typing import Any

#: The words of a text, and so the tokens that it costs.
TOKENS = 7
_BODY = json.dumps({"text": "word " * TOKENS}).encode()
#: The longest time in which the server may answer a request, in seconds. Then the request counts as unanswered.
_PATIENCE = 60.0


class Connection:
    """One connection. It sends a request, reads the whole response, and then sends the next request."""

    def __init__(self, port: int, key: str, secret: str, load: Load) -> None:
        self._port, self._key, self._load = port, key, load
        head = f"Host: 127.0.0.1:{port}\r\nAuthorization: Api-Key {secret}\r\nAccept: application/json\r\n"
        self._time = f"GET /api/time/ HTTP/1.1\r\n{head}\r\n".encode()
        more = f"Content-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n"
        self._text = f"POST /api/text/ HTTP/1.1\r\n{head}{more}\r\n".encode() + _BODY
        self._number = 0
        self._open()
        self._send()

    def _open(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", self._port), _PATIENCE)
        self._load.selector.register(self._socket, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Close the connection."""
        self._load.selector.unregister(self._socket)
        self._socket.close()

    def _send(self) -> None:
        self._buffer, self.began = b"", time.perf_counter()
        self._number += 1
        self.is_text = self._number % 4 == 0
        self._socket.sendall(self._text if self.is_text else self._time)

    def read(self, may_send: bool) -> bool:
        """Read bytes that have arrived. Return whether the request has ended.

        Then send the next one, if there may be one.
        """
        try:
            piece = self._socket.recv(65536)
        except OSError:
            piece = b""
        self._buffer += piece
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0) if found else 0
        answered = bool(found) and len(body) >= length
        if piece and not answered:
            return False
        self._load.note(self._key, int(head.split(b" ", 2)[1]) if answered else None, self)
        if not piece or b"\r\nconnection: close" in head.lower():
            self.close()
            self._open()
        if may_send:
            self._send()
        return True


class Load:
    """All connections, and what came of their requests."""

    def __init__(self, port: int, keys: list[tuple[str, str]]) -> None:
        self.selector = selectors.DefaultSelector()
        #: By outcome, key and meter: the units. An outcome is "acknowledged" or "unanswered".
        self.units: Counter[tuple[str, str, str]] = Counter()
        self.statuses: Counter[str] = Counter()
        self.times: list[float] = []
        self.connections = [Connection(port, key, secret, self) for key, secret in keys]

    def note(self, key: str, status: int | None, connection: Connection) -> None:
        """Count a request that has ended. Without a status it was not answered."""
        self.times.append(time.perf_counter() - connection.began)
        self.statuses["unanswered" if status is None else str(status)] += 1
        if status is None or status == 200:
            outcome = "unanswered" if status is None else "acknowledged"
            self.units[outcome, key, "requests"] += 1
            if connection.is_text:
                self.units[outcome, key, "tokens"] += TOKENS

    def run(self, seconds: float, interval: float) -> None:
        """Send requests for this time. Then wait for the last responses."""
        began = last = time.monotonic()
        while time.monotonic() < began + seconds:
            for key, _events in self.selector.select(interval):
                if key.data is None:
                    return  # Standard input has ended.
                key.data.read(True)
            if time.monotonic() >= last + interval:
                self.tell(time.monotonic() - last)
                last = time.monotonic()
        waiting, deadline = set(self.connections), time.monotonic() + _PATIENCE
        while waiting and time.monotonic() < deadline:
            for key, _events in self.selector.select(1):
                if key.data in waiting and key.data.read(False):
                    waiting.discard(key.data)
        for connection in waiting:
            self.note(connection._key, None, connection)
        self.tell(max(time.monotonic() - last, 0.001), end=True)

    def tell(self, seconds: float, *, end: bool = False) -> None:
        """Write a line of JSON, and begin the next span of time."""
        times = sorted(self.times) or [0.0]
        line: dict[str, Any] = {
            "end": end,
            "per_second": len(self.times) / seconds,
            "p99_ms": times[int(0.99 * (len(times) - 1))] * 1000,
            "statuses": self.statuses,
            "units": [[*names, count] for names, count in self.units.items()],
        }
        print(json.dumps(line), flush=True)
        self.times = []


def main(port: int, seconds: float, interval: float) -> None:
    load = Load(port, json.loads(sys.stdin.readline()))
    load.selector.register(sys.stdin, selectors.EVENT_READ)
    load.run(seconds, interval)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
