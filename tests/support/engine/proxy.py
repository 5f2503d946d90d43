"""A TCP proxy in front of the server. It counts commands, and can lose or delay replies."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

from tests.support.eventually import PATIENCE


class Pair:
    """The two ends of a connection: when bytes last came, whether any came, and whether the proxy swallows them."""

    def __init__(self) -> None:
        self.used = time.monotonic()
        self.begun = False
        self.forgotten = False


class Proxy:
    """Forward to 127.0.0.1:`port`. While `lose` is set, replies are lost. `hold` keeps replies until `let_go`.

    While `tear` is set, a connection ends in the middle of its next reply. Replies are late by `delay` seconds. If
    `piece` is not 0, replies come in pieces of this number of bytes. In replies, each key of `replaced` is replaced by
    its value of the same length. `forget` drops idle connections. If the first bytes on a connection do not contain
    `first`, nothing on it is forwarded.
    """

    def __init__(self, port: int) -> None:
        self._targets = [("127.0.0.1", port)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lose = threading.Event()
        self.cut = threading.Event()
        self.tear = threading.Event()
        self.delay = 0.0
        self.piece = 0
        self.replaced: dict[bytes, bytes] = {}
        self.first = b""
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._pairs: list[Pair] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.sent = b""
        self.connections = 0
        #: Connections that neither side has closed.
        self.open = 0
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self) -> None:
        """Keep replies back."""
        self._flowing.clear()

    def let_go(self) -> None:
        """Send the replies that were kept back."""
        self._flowing.set()

    def forget(self, seconds: float = 0.0) -> int:
        """Drop connections without a word: swallow whatever comes on those that were idle for longer than this.

        Return how many these are. Neither side hears that the other one closes its end. Balancers and firewalls do so.
        """
        now, forgotten = time.monotonic(), 0
        with self._lock:
            for pair in self._pairs:
                if not pair.forgotten and now - pair.used > seconds:
                    pair.forgotten = True
                    forgotten += 1
        return forgotten

    def drain(self) -> None:
        """End all connections towards the clients, but still forward what clients send. Proxies that drain do so."""
        with self._lock:
            clients = self._sockets[::2]
        for client in clients:
            with suppress(OSError):  # this connection has ended
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # acknowledge late what comes
                client.shutdown(socket.SHUT_WR)

    def use(self, port: int) -> None:
        """Forward to another server from now on. End all connections to the old one."""
        self.in_turn(port)
        for end in list(self._sockets):
            _shut_down(end)

    def in_turn(self, *ports: int) -> None:
        """Forward new connections to these servers in turn, as a balancer does."""
        self._targets = [("127.0.0.1", port) for port in ports]

    def count(self, command: bytes) -> int:
        """Return how often clients sent a command of this name."""
        with self._lock:
            return self.sent.upper().count(b"\r\n" + command.upper() + b"\r\n")

    def wait_for(self, command: bytes, times: int = 1) -> None:
        """Wait until clients have sent a command this often."""
        deadline = time.monotonic() + PATIENCE
        while self.count(command) < times:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._targets[self.connections % len(self._targets)])
            except OSError:
                client.close()
                continue
            pair = Pair()
            with self._lock:
                self._sockets += [client, server]
                self._pairs.append(pair)
                self.connections += 1
                self.open += 1
            self._start(self._forward, client, server, pair, True)
            self._start(self._forward, server, client, pair, False)

    def _changed(self, data: bytes) -> bytes:
        for old, new in self.replaced.items():
            data = data.replace(old, new)
        return data

    def _passes(self, pair: Pair, data: bytes, requests: bool) -> bool:
        """Note bytes that came. Return whether they are forwarded."""
        with self._lock:
            pair.used = time.monotonic()
            if not pair.begun:
                pair.begun, pair.forgotten = True, self.first not in data
            if requests and not pair.forgotten:
                self.sent += data
            return not pair.forgotten

    def _forward(self, source: socket.socket, target: socket.socket, pair: Pair, requests: bool) -> None:
        try:
            while data := source.recv(65536):
                if not self._passes(pair, data, requests):
                    continue
                if not requests:
                    self._flowing.wait()
                    if self.cut.is_set():
                        break
                    if self.lose.is_set():
                        continue
                    if self.tear.is_set():
                        target.sendall(data[: len(data) // 2])
                        break
                    data = self._changed(data)
                    if self.delay:
                        time.sleep(self.delay)
                    data = self._send_pieces(target, data)
                target.sendall(data)
        except OSError:
            pass
        if requests:
            with self._lock:
                self.open -= 1
        if pair.forgotten:
            return
        for end in (source, target):
            _shut_down(end)

    def _send_pieces(self, target: socket.socket, data: bytes) -> bytes:
        """Send all pieces but the last, and return the rest."""
        if self.piece:
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(data) > self.piece:
                target.sendall(data[: self.piece])
                data = data[self.piece :]
        return data

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            _shut_down(end)
        for thread in self._threads:
            thread.join(5)
        for end in self._sockets:
            end.close()


def _shut_down(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
