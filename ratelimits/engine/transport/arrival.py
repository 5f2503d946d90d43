"""Say whether a command can have reached the server after its connection has failed.

If the server cannot have the whole command, it did nothing, and the command can be sent again. In all other cases
nobody knows: the command is never sent again, because a decision that is sent twice is charged twice.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
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
#: The places of three numbers (64 bits each) in the `tcp_info` of Linux, and its length up to the last of them:
#: tcpi_bytes_acked, then tcpi_bytes_sent and tcpi_bytes_retrans.
_ACKED, _SENT, _LENGTH = 120, 200, 216


def not_written(error: BaseException | None) -> bool:
    """Return whether this error of `sendall` means that a part of the command was never sent.

    The handler of a signal can raise a TimeoutError after `sendall` has sent everything. Such an error has no number.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, OSError) and error.errno in _LOST


def never_arrived(sock: Any, length: int) -> bool:
    """Return whether the other side had closed the connection before it got a byte of the last `length` sent bytes.

    Ask only after the end of the stream was read. This end comes with the number of bytes that the other side had
    received until then. Nothing that it receives later is read, because a server closes both directions at once. The
    answer is False if the system does not count acknowledged bytes (only Linux does, and only for TCP).
    """
    if sys.platform != "linux":
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
        (acked,) = struct.unpack_from("=Q", info, _ACKED)
        sent, sent_again = struct.unpack_from("=QQ", info, _SENT)
    except (OSError, AttributeError, TypeError, struct.error):
        return False
    # Linux also counts the beginning of the connection (SYN) as an acknowledged byte.
    return bool(acked > 1 and sent - sent_again - (acked - 1) >= length > 1)
