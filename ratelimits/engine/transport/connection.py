"""One connection of redis-py's, and what is asked on it: one command, one reply, nothing that is sent twice."""

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

    `event` is what failed. Calls that one lost connection failed share it: it is one failure of the server.
    """

    def __init__(self, message: str = "", event: object = None) -> None:
        super().__init__(message)
        self.event = event


class NotSent(Unavailable):
    """No connection: the call did not take place."""


class Unanswered(Unavailable):
    """The call was sent and its reply was lost: whether it took place is unknown."""


class Interrupted(Unanswered):
    """The caller was stopped as it waited for the reply: the server is not to blame.

    It is the cause of what stopped the caller, such as SystemExit or a timeout of gevent's, which is raised as it is.
    """


class NotReached(NotSent, RedisConnectionError):
    """No node of a cluster could be asked, by a decision or by anything else."""


_REFUSES = re.compile(r"^NOREPLICAS |-(?:READONLY|NOREPLICAS) ")


def refuses_writes(error: ResponseError) -> bool:
    """Whether a server says that it is a replica by now, or has lost its replicas: it wrote nothing.

    Another server may be the primary already: the connection is to be made anew.
    """
    # Redis 6.2 says it inside of what a script failed with.
    return isinstance(error, ReadOnlyError) or _REFUSES.search(str(error)) is not None


def failure(error: BaseException) -> Unavailable:
    """What has become of a call that ended so: unknown, unless the server said that it did not begin with it."""
    # What a connection under Sentinel makes of a ReadOnlyError. Not by what it was raised from: that may be a caller's.
    refused = isinstance(error, BusyLoadingError) or str(error) == "The previous master is now a slave"
    return NotSent(str(error)) if refused else Unanswered(str(error))


#: What a connection is asked first, and `run_of` reads: by default all sections but the costly ones.
INFO = b"*1\r\n$4\r\nINFO\r\n"


def run_of(info: bytes) -> str:
    """Return the run of the server that the reply to INFO names."""
    return run_named(dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line))


def run_named(info: Mapping[str, Any]) -> str:
    """Return the run of a server by the fields of its INFO: "<run_id>:<replication id>", as lua/run.lua has it.

    The second part is empty for a server that never was a replica: attaching its first replica gives it another
    replication id, and loses nothing.
    """
    promoted = str(info.get("master_replid2", "")).strip("0")
    return f"{info.get('run_id', '?')}:{info.get('master_replid', '') if promoted else ''}"


#: What a parser says that needs more bytes for a reply.
MORE = object()
_READ = 4096


class RawReplyParser(DefaultParser):  # type: ignore[misc, valid-type]
    """redis-py's parser; with it one reply to one command can be read without the layers around it."""

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        super().on_connect(connection, **kwargs)
        # Where every parser reads from.
        self.socket = connection._sock
        self.timeout = connection.socket_timeout
        self.reader = hiredis.Reader(protocolError=InvalidResponse, replyError=self.parse_error, notEnoughData=MORE)
        self.slow = True

    def can_read(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().can_read(*args, **kwargs)
        finally:
            self.slow = True  # it has set the socket's own timeout again

    def use_kernel_timeouts(self) -> None:
        """Leave the timeout to the kernel: Python waits for each read and write in a call of its own beforehand.

        Only for a plain socket: TLS reads more than once for a reply, and those of gevent and eventlet never wait. Not
        where a timer signals all the time (a profiler's): the kernel's timeout begins anew with each.
        """
        self.slow = False
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
            return  # a system that writes times otherwise
        self.socket.settimeout(None)


class OwnedConnection:
    """A connection that a call has to itself, the server's run, and when it was last used (seconds).

    `process` is a token of the process that made it.
    """

    __slots__ = ("connection", "process", "raw_parser", "run", "used")

    def __init__(self, make: Callable[..., Any], kwargs: dict[str, Any], process: object) -> None:
        self.raw_parser: RawReplyParser | None = None
        # Not where somebody has configured another parser.
        parser = kwargs.get("parser_class", DefaultParser)
        self.connection = make(**{**kwargs, "parser_class": self._parser if parser is DefaultParser else parser})
        self.process = process
        self.run = ""
        self.used = 0.0

    def greet(self) -> None:
        """Connect and learn the run of the server. Raise NotSent."""
        self.run = greet(self.connection)

    def closed(self) -> bool:
        """Return whether the server has closed it, or has said what nobody asked for."""
        try:
            return bool(self.connection.can_read(0))
        except (RedisError, OSError):
            return True

    def _parser(self, socket_read_size: int) -> RawReplyParser:
        self.raw_parser = RawReplyParser(socket_read_size)
        return self.raw_parser

    def exchange(self, packed: bytes) -> Any:
        """The reply to a command. Raises Unanswered, or what the server refuses with."""
        raw_parser = self.raw_parser
        if raw_parser is None:
            return exchange(self.connection, packed)
        try:
            if raw_parser.slow:
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
            # Whatever interrupts a call, its reply must not be read by the next one.
            self.connection.disconnect()
            raise error from Interrupted(repr(error))


def exchange(connection: Any, packed: bytes) -> Any:
    """The reply to a command on any connection of redis-py's. Raises Unanswered, or what the server refuses with."""
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
    """Connect any connection of redis-py's and return the run of the server. Raise NotSent."""
    try:
        connection.connect()
        connection.send_packed_command([INFO], check_health=False)
        return run_of(connection.read_response())
    except (RedisError, OSError) as error:
        connection.disconnect()
        raise NotSent(str(error)) from error
