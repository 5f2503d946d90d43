"""Say whether a command can reach the server: before it is sent, and after it could not be sent completely.

If the server cannot have the whole command, it did nothing, and the command can be sent again. In all other cases
nobody knows: the command is never sent again, because a decision that is sent twice is charged twice.
"""

from __future__ import annotations

import errno
import socket
import ssl
import sys
from typing import Any

#: Errors of a connection that is already lost. If `sendall` raises one of them, the kernel did not take the last bytes
#: of the command, and a server does nothing with a part of a command.
_LOST = {
    errno.EPIPE,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
#: The first byte of the `tcp_info` of Linux, if the other side has reset the connection (CLOSE) or has sent its end
#: (CLOSE_WAIT).
_ENDED = (b"\x07", b"\x08")


def not_written(error: BaseException | None) -> bool:
    """Return whether this error of `sendall` means that a part of the command was never sent.

    The handler of a signal can raise a TimeoutError after `sendall` has sent everything. Such an error has no number.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, OSError) and error.errno in _LOST


def ended(sock: Any) -> bool:
    """Return whether the other side has already sent the end of the connection. If so, send no command on it.

    Ask before a command is sent. Afterwards nothing proves that the other side did not get the command: a proxy that
    drains its connections sends the end to the client, and still forwards what the client sends. Even if it then resets
    the connection, it has perhaps forwarded the command before. The answer is False if the system does not say (only
    Linux does, and only for TCP).
    """
    if sys.platform != "linux":
        return False
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) in _ENDED
    except (OSError, AttributeError):
        return False
