"""POST over HTTP with one time limit for the whole exchange, from connecting to the answer's last byte.

A socket's own timeout begins anew with each byte that arrives, so a slow peer could keep a worker for hours.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: The most of an answer's body that is read, in bytes.
MAX_BODY = 1_048_576


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back: the status, the headers, and the body up to MAX_BODY bytes."""

    status: int
    headers: Message
    body: bytes = b""

    @property
    def says(self) -> str:
        """The status in words, for messages."""
        return f"it answered {self.status} {http.client.responses.get(self.status, '')}".strip()

    def retry_after(self) -> float | None:
        """Return the seconds that Retry-After asks to wait, from 0 up; None if it names none."""
        value = (self.headers.get("Retry-After") or "").strip()
        if value.isascii() and value.isdecimal():
            return float(value)
        try:
            return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
        except (ValueError, OverflowError):
            return None


class Deadline:
    """The moment at which an exchange must be over."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left; TimeoutError when none are."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


class _Reading(io.RawIOBase):
    """What arrives on a socket until a deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read at least a byte, 0 at the end. Raises TimeoutError when the deadline comes first."""
        self._sock.settimeout(self._deadline.left())
        return self._sock.recv_into(buffer)


class _TimedSocket:
    """A socket, as far as http.client uses one, whose every step ends at the deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: ReadableBuffer) -> None:
        """Send all of it. Raises TimeoutError when the deadline comes first."""
        rest = memoryview(data).cast("B")
        while rest:
            self._sock.settimeout(self._deadline.left())
            rest = rest[self._sock.send(rest) :]

    def makefile(self, _mode: str) -> BinaryIO:
        """Return a buffered reader, as a socket's own method does."""
        return io.BufferedReader(_Reading(self._sock, self._deadline))

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


class Connection:
    """A connection to the host of an address, for one exchange; close it, or use it as a context manager."""

    def __init__(self, url: str, timeout: float) -> None:
        """Connect; the exchange must be over `timeout` seconds from then.

        Looking up the host's name comes on top: the system's resolver has limits of its own. Raises OSError when there
        is no connection, ValueError for what is no address: the host then knows nothing of any request.
        """
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if parts.hostname is None or not (secure or parts.scheme == "http"):
            raise ValueError(f"{url!r} is no address")
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port)
        found = socket.getaddrinfo(self._connection.host, self._connection.port, type=socket.SOCK_STREAM)
        deadline = Deadline(timeout)
        sock = _connected(found, deadline)
        try:
            if secure:
                sock.settimeout(deadline.left())
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
        except BaseException:
            sock.close()
            raise
        self._sock = self._connection.sock = cast("socket.socket", _TimedSocket(sock, deadline))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self._connection.close()

    def post(self, content: bytes, fields: dict[str, str], *, body: bool = True) -> HttpAnswer:
        """POST and return the answer; without `body` it ends with its headers. Redirects are not followed.

        Raises OSError or http.client.HTTPException when no answer, or not all of it, came.
        """
        self._connection.request("POST", self._path, content, fields)
        with http.client.HTTPResponse(self._sock, method="POST") as response:
            response.begin()
            return HttpAnswer(response.status, response.headers, response.read(MAX_BODY) if body else b"")


def _connected(found: list[Any], deadline: Deadline) -> socket.socket:
    """Return a connection to the first of these addresses that answers. Raises OSError if none does."""
    failure = OSError("there is no address")
    for family, kind, protocol, _name, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure
