"""Ask a server for its run, send one command on a connection of redis-py and read its reply.

No command is sent twice, unless it was dropped.

A run is the time from a start of the server until it restarts or a replica is promoted. The server itself names the
run, in a script: proxies can change the reply to INFO, but not what a script reads. Everything that needs the run asks
here, or calls the same lua/run.lua in its own script.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import hiredis
import redis
from redis.connection import DefaultParser
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    MasterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from ratelimits.engine.assemble import scripts
from ratelimits.engine.assemble.scripts import resp
from ratelimits.engine.transport.ages import closed, connect, ended
from ratelimits.engine.transport.refused import refused

#: The name of a run that the server does not tell. Then nobody can know whether the server restarted.
UNREADABLE = "unreadable:"
#: The script that returns the run of the server.
RUN_SCRIPT = scripts.script(scripts.text("run") + "\nreturn server_run()")
#: How Amazon ElastiCache Serverless refuses a script without a Redis key.
_KEYLESS = "scripts without any input keys"
#: The command that asks for the run: the first command on each connection.
ASK_RUN = resp(b"EVAL", RUN_SCRIPT.text, b"0")


def run_of(reply: bytes | str) -> str:
    """Return the run from the reply to `ASK_RUN`."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)


def run_after(error: ResponseError) -> str:
    """Return the run if the server answers `ASK_RUN` with this error. Raise the error if it refuses no command.

    A server that refuses EVAL can still decide by EVALSHA. Some servers refuse only scripts without a Redis key, as
    `ASK_RUN` is one.
    """
    if refused(error) is None and _KEYLESS not in str(error):
        raise error
    return UNREADABLE


def read_run(client: redis.Redis, key: str | None = None) -> str:
    """Return the run of the client's server. Raise redis.exceptions.RedisError if the server does not answer.

    `key` is any Redis key of the app on this server. It is neither read nor written. Without it, some servers refuse
    the script, and the run is unreadable.
    """
    keys = [] if key is None else [key]
    try:
        reply: Any = client.eval(RUN_SCRIPT.text.decode(), len(keys), *keys)
    except ResponseError as error:
        return run_after(error)
    return run_of(reply)


class Unavailable(Exception):
    """The server could not be asked, or did not answer.

    If several calls fail because one connection was lost, their errors have the same `event`. Then the circuit breaker
    counts these calls as one failure.
    """

    def __init__(self, message: str = "", event: object = None) -> None:
        super().__init__(message)
        self.event = event


class NotSent(Unavailable):
    """The call was not sent, so the server did nothing."""


class Dropped(NotSent):
    """The connection was lost before the whole command was sent. Another connection can send this command.

    Also raised if the server wants other credentials, or refuses writes because another server is perhaps the primary
    now: then it has read the command, but did nothing.
    """


class Unanswered(Unavailable):
    """The call was sent, but its reply was lost. Nobody knows whether the server has carried out the call."""


class Interrupted(Unanswered):
    """The caller was stopped while it waited for the reply. The server did not fail.

    This error is the `__cause__` of the exception that stopped the caller, such as SystemExit or a timeout of gevent.
    """


class NotReached(NotSent, RedisConnectionError):
    """No node of a cluster could be asked."""


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
#: Errors with which a server refuses a write. The error of a script contains the error of its command.
_WRITE_REFUSED = re.compile(r"^NOREPLICAS |: -(?:READONLY|NOREPLICAS) ")


def refuses_writes(error: ResponseError) -> bool:
    """Return whether the error means that the server wrote nothing, because it is a replica or has too few replicas.

    If so, the caller closes the connection, and may send the command on another one: perhaps another server is the
    primary now.
    """
    # A replica that hears nothing of its primary can refuse all commands (`replica-serve-stale-data no`: MASTERDOWN).
    # In Redis 6.2 the error of a script is a ResponseError that contains the server's error in its text.
    return isinstance(error, ReadOnlyError | MasterDownError) or _WRITE_REFUSED.search(str(error)) is not None


def failure(error: BaseException) -> Unavailable:
    """Return the Unavailable error for a call that failed with `error`.

    Return NotSent if the server said that it did not begin the call, otherwise Unanswered.
    """
    # A Sentinel connection replaces a ReadOnlyError by an error with this text.
    if isinstance(error, AuthenticationError) or str(error) == "The previous master is now a slave":
        return Dropped(str(error))
    return NotSent(str(error)) if isinstance(error, BusyLoadingError) else Unanswered(str(error))


def not_written(error: BaseException | None) -> bool:
    """Return whether this error of `sendall` means that a part of the command was never sent.

    The handler of a signal can raise a TimeoutError after `sendall` has sent everything. Such an error has no number.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, OSError) and error.errno in _LOST


#: A parser returns this object if it needs more bytes for a reply.
MORE = object()
#: Maximum number of bytes that one read of the socket returns.
_READ_BYTES = 4096


class RawReplyParser(DefaultParser):  # type: ignore[misc, valid-type]
    """The parser of redis-py. To save time, a call uses the socket and the reader of this parser directly."""

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        super().on_connect(connection, **kwargs)
        self.socket = connection._sock
        self.timeout = connection.socket_timeout
        self.reader = hiredis.Reader(protocolError=InvalidResponse, replyError=self.parse_error, notEnoughData=MORE)
        #: Whether the timeouts must be set in the kernel before the next call.
        self.kernel_timeouts_due = True

    def can_read(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().can_read(*args, **kwargs)
        finally:
            self.kernel_timeouts_due = True  # can_read of redis-py has set a timeout in Python again

    def use_kernel_timeouts(self) -> None:
        """Set the socket's timeouts in the kernel. Timeouts in Python need one more system call at each read and write.

        Do nothing for sockets of TLS, because TLS can read several times for one reply. Do nothing for sockets of
        gevent and eventlet, because these never block. Do nothing if a timer sends signals (a profiler has such a
        timer), because each signal restarts the timeout in the kernel.
        """
        self.kernel_timeouts_due = False
        kind = type(self.socket)
        is_plain_socket = kind.__module__ == "socket" and kind.__name__ == "socket"
        if not is_plain_socket or os.name != "posix" or not self.timeout:
            return
        # The second item of `getitimer` is the interval of the timer; 0 if it does not repeat.
        if any(signal.getitimer(timer)[1] for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
            return
        timeval_of_c = struct.pack("ll", *divmod(round(self.timeout * 1e6), 1_000_000))  # seconds, microseconds
        try:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, timeval_of_c)
        except OSError:
            return  # this system has another format for timeouts
        self.socket.settimeout(None)


class OwnedConnection:
    """A connection that only one call uses at a time.

    run         the run of the server when the connection was opened
    until       the moment when the connection must be replaced, in seconds of the monotonic clock
    used        the moment when the last call gave the connection back
    process     an object that stands for the process that made the connection; None if the connection must be replaced
    raw_parser  the parser of the connection; None if the project has configured another parser
    """

    __slots__ = ("__weakref__", "connection", "process", "raw_parser", "run", "until", "used")

    def __init__(self, make: Callable[..., Any], kwargs: dict[str, Any], process: object) -> None:
        self.raw_parser: RawReplyParser | None = None
        # If the project has configured another parser, use that parser.
        parser = kwargs.get("parser_class", DefaultParser)
        self.connection = make(**{**kwargs, "parser_class": self._make_parser if parser is DefaultParser else parser})
        self.process: object = process
        self.run = ""
        self.until = self.used = 0.0

    def greet(self) -> None:
        """Connect and ask the server for its run. Raise NotSent if the server does not answer."""
        self.run = greet(self.connection)

    def ended(self) -> bool:
        """Return whether the other side has already sent the end of the connection."""
        return ended(self.connection._sock)

    def closed(self) -> bool:
        """Return whether the server has closed the connection or has sent unexpected bytes."""
        return closed(self.connection)

    def _make_parser(self, socket_read_size: int) -> RawReplyParser:
        self.raw_parser = RawReplyParser(socket_read_size)
        return self.raw_parser

    def exchange(self, packed: bytes) -> Any:
        """Send a command and return its reply.

        Raise Dropped, another NotSent, Unanswered, or the ResponseError of the server.
        """
        raw_parser = self.raw_parser
        if raw_parser is None:
            return exchange(self.connection, packed)
        try:
            if raw_parser.kernel_timeouts_due:
                raw_parser.use_kernel_timeouts()
            sock, reader = raw_parser.socket, raw_parser.reader
            try:
                sock.sendall(packed)
            except OSError as error:
                if not_written(error):
                    raise Dropped(f"the connection was lost: {error}") from error
                raise
            reply: Any = MORE
            while reply is MORE:
                data = sock.recv(_READ_BYTES)
                if not data:
                    raise RedisConnectionError("the server closed the connection")
                reader.feed(data)
                reply = reader.gets()
            if isinstance(reply, Exception):
                raise reply
            return reply
        except ResponseError as error:
            if not refuses_writes(error):
                raise
            self.connection.disconnect()
            raise Dropped(str(error)) from error
        except BlockingIOError as error:  # the timeout in the kernel has ended
            self.connection.disconnect()
            raise Unanswered(f"no reply within {raw_parser.timeout:g} s") from error
        except BaseException as error:  # noqa: BLE001  (raised again)
            # The call was perhaps interrupted. If the connection stayed open, the next call would read its reply.
            self.connection.disconnect()
            _raise_for_caller(error)


def _raise_for_caller(error: BaseException) -> NoReturn:
    """Raise the error for the caller of a call that failed with `error`."""
    if isinstance(error, Unavailable):
        raise error
    if isinstance(error, RedisError | OSError):
        raise failure(error) from error
    raise error from Interrupted(repr(error))


def exchange(connection: Any, packed: bytes) -> Any:
    """Do the same as `OwnedConnection.exchange`, with any connection of redis-py."""
    try:
        try:
            connection.send_packed_command([packed], check_health=False)
        except RedisError as error:
            if not_written(error.__context__):
                raise Dropped(str(error)) from error
            raise
        return connection.read_response(disconnect_on_error=False)
    except ResponseError as error:
        if not refuses_writes(error):
            raise
        connection.disconnect()
        raise Dropped(str(error)) from error
    except BaseException as error:  # noqa: BLE001  (raised again)
        connection.disconnect()
        _raise_for_caller(error)


def greet(connection: Any) -> str:
    """Open a connection of redis-py and return the run of the server. Raise NotSent if the server does not answer."""
    try:
        connect(connection)
        connection.send_packed_command([ASK_RUN], check_health=False)
        try:
            return run_of(connection.read_response())
        except ResponseError as error:
            return run_after(error)
    except (RedisError, OSError) as error:
        connection.disconnect()
        raise NotSent(str(error)) from error
