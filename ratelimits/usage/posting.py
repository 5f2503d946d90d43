"""Send a POST request with one time limit for everything, from connecting to the last byte of the response.

The timeout of a socket is not enough, because it starts again with each byte: a slow server could keep a worker busy
for hours.
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
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast
from urllib.parse import urlsplit

from ratelimits.addresses import ipv4_in

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: All IPv6 addresses that were ever assigned to the public internet (RFC 4291, IANA).
_GLOBAL_UNICAST = IPv6Network("2000::/3")
#: Maximum number of bytes of an answer's body that are read.
MAX_BODY = 1_048_576


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer: its status, its headers, and at most `MAX_BODY` bytes of its body."""

    status: int
    headers: Message
    body: bytes = b""

    @property
    def summary(self) -> str:
        """Return the status as a part of a sentence, such as "it answered 404 Not Found"."""
        return f"it answered {self.status} {http.client.responses.get(self.status, '')}".strip()

    def retry_after(self) -> float | None:
        """Return the seconds of the header Retry-After (at least 0); None if the header is missing or not valid."""
        value = (self.headers.get("Retry-After") or "").strip()
        if value.isascii() and value.isdecimal():
            return float(value)
        try:
            return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
        except (ValueError, OverflowError):
            return None


class NotPublicError(OSError):
    """Raised if a host has no address of the public internet. Nothing was sent to it."""


class Deadline:
    """The moment at which the whole answer must have arrived."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the remaining seconds. Raise TimeoutError if no time is left."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds


class _TimedReader(io.RawIOBase):
    """A raw stream of the bytes that arrive on a socket before the deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read at least one byte, and return the number of bytes (0 at the end). Raise TimeoutError at the deadline."""
        self._sock.settimeout(self._deadline.remaining())
        return self._sock.recv_into(buffer)


class _TimedSocket:
    """The methods of a socket that `http.client` uses. Sending and reading stop at the deadline."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def sendall(self, data: ReadableBuffer) -> None:
        """Send all data. Raise TimeoutError at the deadline."""
        unsent = memoryview(data).cast("B")
        while unsent:
            self._sock.settimeout(self._deadline.remaining())
            unsent = unsent[self._sock.send(unsent) :]

    def makefile(self, _mode: str) -> BinaryIO:
        """Return a buffered reader of the bytes that arrive."""
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class Connection:
    """A connection to the host of a URL, for one request. Use it as a context manager."""

    def __init__(self, url: str, timeout: float, *, public_only: bool = False) -> None:
        """Connect. Connecting, sending the request and reading the answer take at most `timeout` seconds together.

        The lookup of the host's name is not included in this time, since the system's resolver has its own time limits.
        If `public_only` is true, connect only to an address of the public internet. There is only one lookup: the
        socket connects to the addresses that were checked. Raise OSError if connecting fails, and ValueError if `url`
        is not a URL of http or https. In both cases no request was sent.
        """
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if parts.hostname is None or not (secure or parts.scheme == "http"):
            raise ValueError(f"{url!r} is not a URL of http or https")
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection_class = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = connection_class(parts.hostname, parts.port)
        addresses = socket.getaddrinfo(self._connection.host, self._connection.port, type=socket.SOCK_STREAM)
        if public_only:
            # The last item of each row is (IP address, port, …).
            addresses = [row for row in addresses if is_public(str(row[4][0]))]
            if not addresses:
                raise NotPublicError("the host has no public address (see the setting ALERT_PUBLIC_ONLY)")
        deadline = Deadline(timeout)
        sock = _connected(addresses, deadline)
        try:
            if secure:
                sock.settimeout(deadline.remaining())
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
        except BaseException:
            sock.close()
            raise
        self._sock = self._connection.sock = cast("socket.socket", _TimedSocket(sock, deadline))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def post(self, content: bytes, fields: dict[str, str], *, body: bool = True) -> HttpAnswer:
        """Send a POST request and return the answer. `fields` are the request's headers.

        If `body` is false, the answer's body is not read. Redirects are not followed.

        Raise OSError or http.client.HTTPException if the answer is not complete. The exception's message contains no
        part of the answer: people who can enter a URL must not read data of servers inside the network.
        """
        self._connection.request("POST", self._path, content, fields)
        with http.client.HTTPResponse(self._sock, method="POST") as response:
            try:
                response.begin()
                return HttpAnswer(response.status, response.headers, response.read(MAX_BODY) if body else b"")
            except (http.client.HTTPException, ValueError):
                raise http.client.HTTPException("no complete HTTP answer arrived") from None


def is_public(text: str) -> bool:
    """Return whether an address belongs to the public internet.

    If the address stands for an IPv4 address, return whether this IPv4 address belongs to the public internet.
    """
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = ipv4_in(address)
        if inner is not None:
            return is_public(str(inner))
        if address not in _GLOBAL_UNICAST:
            return False  # also site-local addresses and NAT64 networks of an operator, which lead to any address
    return address.is_global and not address.is_multicast


def _connected(addresses: list[Any], deadline: Deadline) -> socket.socket:
    """Return a socket that is connected to the first address that answers. Raise OSError if none answers."""
    failure = OSError("the host has no address")
    for family, kind, protocol, _name, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.remaining())
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure
