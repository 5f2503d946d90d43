"""Exchange one command and one reply on a connection of redis-py. No command is sent twice."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import hiredis
from redis.connection import DefaultParser
from redis.exceptions import BusyLoadingError, InvalidResponse, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError


class Unavailable(Exception):
    """The server could not be asked.

    `event` is the same object for all calls that failed with one lost connection: that is one failure of the server.
    """

    def __init__(self, message: str = "", event: object = None) -> None:
        super().__init__(message)
        self.event = event


class NotSent(Unavailable):
    """The call was not sent, so it did not take place."""


class Unanswered(Unavailable):
    """The call was sent and its reply was lost. Nobody knows whether it took place."""


class Interrupted(Unanswered):
    """The caller was stopped while it waited for the reply. The server has not failed.

    It is the `__cause__` of the exception that stopped the caller, such as SystemExit or a timeout of gevent.
    """


class NotReached(NotSent, RedisConnectionError):
    """No node of a cluster could be asked."""


_REFUSES = re.compile(r"^NOREPLICAS |-(?:READONLY|NOREPLICAS) ")


def refuses_writes(error: ResponseError) -> bool:
    """Return whether an error says that the server is a replica, or has lost its replicas: it wrote nothing.

    Another server may be the primary by now, so close the connection and connect again.
    """
    # Redis 6.2 says so within the error of the script.
    return isinstance(error, ReadOnlyError) or _REFUSES.search(str(error)) is not None


def failure(error: BaseException) -> Unavailable:
    """Return Unanswered for a call that ended with this error; NotSent if the server said that it did not begin."""
    # The text is what a Sentinel connection makes of a ReadOnlyError. Its cause says nothing: it may be the caller's.
    refused = isinstance(error, BusyLoadingError) or str(error) == "The previous master is now a slave"
    return NotSent(str(error)) if refused else Unanswered(str(error))


#: The first command on a connection; `run_of` reads its reply. INFO without a section leaves out the costly ones.
INFO = b"*1\r\n$4\r\nINFO\r\n"


def run_of(info: bytes) -> str:
    """Return the run of the server by its reply to INFO."""
    # The server's path is in it too, and need not be UTF-8.
    text = info.decode(errors="replace")
    return run_named(dict(line.split(":", 1) for line in text.splitlines() if ":" in line))


def run_named(info: Mapping[str, Any]) -> str:
    """Return the run of a server by the fields of its INFO: "<run_id>:<replication id>", as lua/run.lua does.

    The second part is empty for a server that never was a replica: attaching its first replica changes the replication
    id, but loses nothing.
    """
    promoted = str(info.get("master_replid2", "")).strip("0")
    return f"{info.get('run_id', '?')}:{info.get('master_replid', '') if promoted else ''}"


#: What a parser returns if it needs more bytes for a reply.
MORE = object()
_READ = 4096


class RawReplyParser(DefaultParser):  # type: ignore[misc, valid-type]
    """redis-py's parser, with access to its reader, so that a reply is read without redis-py's other layers."""

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        super().on_connect(connection, **kwargs)
        # Every parser of redis-py reads from this socket.
        self.socket = connection._sock
        self.timeout = connection.socket_timeout
        self.reader = hiredis.Reader(protocolError=InvalidResponse, replyError=self.parse_error, notEnoughData=MORE)
        self.kernel_timeouts_due = True

    def can_read(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().can_read(*args, **kwargs)
        finally:
            self.kernel_timeouts_due = True  # this has set a timeout in Python again

    def use_kernel_timeouts(self) -> None:
        """Leave timeouts to the kernel. For a timeout in Python, each read and write needs a further system call.

        Do nothing unless the socket is a plain one: TLS reads more than once for a reply, and sockets of gevent and
        eventlet never block. Do nothing if a timer sends signals, as for a profiler: each one restarts the kernel's
        timeout.
        """
        self.kernel_timeouts_due = False
        kind = type(self.socket)
        if (kind.__module__, kind.__name__, os.name) != ("socket", "socket", "posix") or not self.timeout:
            return
        if any(signal.getitimer(timer)[1] for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
            return
        whole, part = divmod(round(self.timeout * 1e6), 1_000_000)
        try:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, part))
        except OSError:
            return  # a system with another format of times
        self.socket.settimeout(None)


class OwnedConnection:
    """A connection that one call uses alone, with the server's run and the moment of its last use (seconds).

    `process` is a token of the process that made it.
    """

    __slots__ = ("connection", "process", "raw_parser", "run", "used")

    def __init__(self, make: Callable[..., Any], kwargs: dict[str, Any], process: object) -> None:
        self.raw_parser: RawReplyParser | None = None
        # Not if the project has configured another parser.
        parser = kwargs.get("parser_class", DefaultParser)
        self.connection = make(**{**kwargs, "parser_class": self._parser if parser is DefaultParser else parser})
        self.process = process
        self.run = ""
        self.used = 0.0

    def greet(self) -> None:
        """Connect and learn the run of the server. Raise NotSent."""
        self.run = greet(self.connection)

    def closed(self) -> bool:
        """Return whether the server has closed the connection, or has sent something unexpected."""
        try:
            return bool(self.connection.can_read(0))
        except (RedisError, OSError):
            return True

    def _parser(self, socket_read_size: int) -> RawReplyParser:
        self.raw_parser = RawReplyParser(socket_read_size)
        return self.raw_parser

    def exchange(self, packed: bytes) -> Any:
        """Send a command and return its reply. Raise NotSent, Unanswered, or the ResponseError of the server."""
        raw_parser = self.raw_parser
        if raw_parser is None:
            return exchange(self.connection, packed)
        try:
            if raw_parser.kernel_timeouts_due:
                raw_parser.use_kernel_timeouts()
            sock, reader = raw_parser.socket, raw_parser.reader
            sock.sendall(packed)
            reply: Any = MORE
            while reply is MORE:
                data = sock.recv(_READ)
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
            raise NotSent(str(error)) from error
        except BlockingIOError as error:
            self.connection.disconnect()
            raise Unanswered(f"no reply within {raw_parser.timeout:g} s") from error
        except (RedisError, OSError) as error:
            self.connection.disconnect()
            raise failure(error) from error
        except BaseException as error:
            # If a call is interrupted, the next call must not read its reply.
            self.connection.disconnect()
            raise error from Interrupted(repr(error))


def exchange(connection: Any, packed: bytes) -> Any:
    """Do as `OwnedConnection.exchange`, on any connection of redis-py."""
    try:
        connection.send_packed_command([packed], check_health=False)
        return connection.read_response()
    except ResponseError as error:
        if not refuses_writes(error):
            raise
        connection.disconnect()
        raise NotSent(str(error)) from error
    except (RedisError, OSError) as error:
        connection.disconnect()
        raise failure(error) from error
    except BaseException as error:
        connection.disconnect()
        raise error from Interrupted(repr(error))


def greet(connection: Any) -> str:
    """Connect any connection of redis-py and return the run of the server. Raise NotSent."""
    try:
        connection.connect()
        connection.send_packed_command([INFO], check_health=False)
        return run_of(connection.read_response())
    except (RedisError, OSError) as error:
        connection.disconnect()
        raise NotSent(str(error)) from error
