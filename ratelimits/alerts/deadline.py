"""One time limit over many waits: a socket's own begins anew with each byte that arrives."""

from __future__ import annotations

import io
import socket
import time
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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


class Reading(io.RawIOBase):
    """What arrives on a socket until a deadline; it stands for the socket where http.client reads a response."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock, self._deadline = sock, deadline

    def makefile(self, _mode: str) -> BinaryIO:
        """Return a buffered reader, as a socket's own method does."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read at least a byte, 0 at the end. Raises TimeoutError when the deadline comes first."""
        self._sock.settimeout(self._deadline.left())
        return self._sock.recv_into(buffer)
