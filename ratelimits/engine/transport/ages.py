"""Say which connections may be used: balancers and firewalls drop idle connections without telling anybody.

Nothing comes back on such a connection, not even an error. So it is found before a command is sent, or never used:

- A connection that was idle for at most JUST_NOW seconds is used at once.
- After a longer time, the app looks whether the other side has ended it. If so, it is replaced.
- A connection that was idle for at most `asked` seconds is used then.
- After a longer time, the server is asked on it (PING). If no answer comes, the connection is replaced.
- A connection that was idle for more than `oldest` seconds is replaced without asking.

Each connection is replaced after some time (`until`), however often it is used. What a process asks for when it
connects, such as the run of the server, can change meanwhile: a right is given or taken away, or another server has the
name. Connections whose credentials expire (tokens of IAM or Entra ID) are also replaced when there are new ones.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from redis.connection import Connection
from redis.exceptions import AuthenticationError, RedisError, ResponseError

# Projects can configure this name, which is older than the place of the credentials in this module.
logger = logging.getLogger("ratelimits.engine.transport.credentials")

#: A look whether a connection has ended takes a system call, which is about 4 % of the time of a decision. Nobody looks
#: at a connection that was idle for at most this number of seconds: in a loop, a decision follows the last one sooner.
JUST_NOW = 0.0001
#: The server is asked on a connection that was idle for more than IDLE seconds. The option `health_check_interval` of
#: the cache alias replaces this number.
IDLE = 1.0
#: A connection that was idle for more than OLDEST seconds is replaced. Balancers wait for a minute or longer.
OLDEST = 30.0
#: Seconds to remember that an idle connection was silent.
REMEMBERED = 600.0
#: A connection is replaced after this number of seconds.
LIFETIME = 600.0
#: The same for a connection whose credentials come from a provider: perhaps the provider does not report new ones.
#: Credentials that expire (of IAM or Entra ID) are new for at least five minutes.
LIFETIME_OF_CREDENTIALS = 240.0
#: Each connection has up to this share of its lifetime less than others, so that the connections that a process made
#: when it began are not replaced together.
SPREAD = 0.1
#: TCP probes a connection that is idle for this number of seconds, then every INTERVAL seconds. After PROBES probes
#: without a reply the connection is closed.
KEEPALIVE, INTERVAL, PROBES = 15, 5, 3
#: The first byte of the `tcp_info` of Linux, if the other side has reset the connection (CLOSE) or has sent its end
#: (CLOSE_WAIT).
_ENDED = (b"\x07", b"\x08")
PING = b"*1\r\n$4\r\nPING\r\n"


class Ages:
    """For how long the connections of a pool may be idle, in seconds.

    asked     see the head of this file
    oldest    see the head of this file; it is shorter for some time after a connection was silent
    wait      how long to wait for the answer to PING
    lifetime  for how long a connection may be used at most
    """

    def __init__(self, kwargs: Mapping[str, Any], timeout: float) -> None:
        self.asked = float(kwargs.get("health_check_interval") or IDLE)
        if not self.asked > 0:
            raise ValueError(f"health_check_interval is {self.asked:g}: write a number of seconds")
        self._longest = max(OLDEST, self.asked)
        #: For how long a silent connection was idle, and until when this is remembered (s, monotonic).
        self._silent, self._remembered_until = self._longest, float("-inf")
        # Half of the time of a call: then a call that has to make a new connection is not much later.
        self.wait = timeout / 2
        self.lifetime = LIFETIME if kwargs.get("credential_provider") is None else LIFETIME_OF_CREDENTIALS

    @property
    def oldest(self) -> float:
        return self._silent if time.monotonic() < self._remembered_until else self._longest

    def until(self) -> float:
        """Return until when a connection may be used that is made now (s, monotonic)."""
        return time.monotonic() + self.lifetime * (1 - SPREAD * random.random())  # noqa: S311

    def was_silent(self, idle: float) -> None:
        """Note that nothing came back on a connection that was idle for `idle` seconds, although the server answers.

        For some time, connections that were idle as long are replaced without asking, so that no call waits for them.
        Not for ever: perhaps nothing drops idle connections, and only this answer was late.
        """
        self._silent = max(self.asked, min(self.oldest, idle))
        self._remembered_until = time.monotonic() + REMEMBERED


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


def closed(connection: Any) -> bool:
    """Return whether the server has closed a connection of redis-py or has sent unexpected bytes."""
    try:
        return bool(connection.can_read(0))
    except (RedisError, OSError):
        return True


def ask(connection: Any, seconds: float) -> bool | None:
    """Return whether the server answers on an open connection of redis-py, and None if nothing comes in time."""
    try:
        connection.send_packed_command([PING], check_health=False)
        if not connection.can_read(seconds):
            return None
        connection.read_response()
    except ResponseError:
        return True  # the user may not send PING
    except (RedisError, OSError):
        return False  # the server has closed the connection, or wants credentials again
    return True


def tcp_options(connection_class: type[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of TCP with which the system finds dead connections, unless the project has set them."""
    if not issubclass(connection_class, Connection) or not kwargs.get("socket_keepalive", True):
        return {}
    return {"socket_keepalive": True, "socket_keepalive_options": kwargs.get("socket_keepalive_options", _OPTIONS)}


def _options() -> dict[int, int]:
    milliseconds = 1000 * (KEEPALIVE + INTERVAL * PROBES)
    names = {
        "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE": KEEPALIVE,
        "TCP_KEEPINTVL": INTERVAL,
        "TCP_KEEPCNT": PROBES,
        # The same for a connection on which bytes were sent that the other side does not acknowledge.
        "TCP_USER_TIMEOUT": milliseconds,
    }
    return {getattr(socket, name): value for name, value in names.items() if hasattr(socket, name)}


_OPTIONS = _options()


def connect(connection: Any) -> None:
    """Open a connection of redis-py. If its credentials are refused, ask their provider once more.

    They perhaps changed after the provider was asked. Then it has new ones now.
    """
    try:
        connection.connect()
    except AuthenticationError:
        if connection.credential_provider is None:
            raise
        connection.connect()


class Renewable(Protocol):
    """Connections to a server."""

    def renew(self) -> None:
        """Replace each connection before its next use. Take no lock that a call holds while it connects."""


_lock = threading.Lock()
#: For each provider, the connections that use it. A provider calls only one function: the one that was named last.
_users: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # perhaps a thread of the parent held the lock at the fork


os.register_at_fork(after_in_child=_forked)


class _Done:
    """What the function for a provider returns: an async provider awaits it, others ignore it."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def follow(provider: Any, connections: Renewable) -> None:
    """Renew the connections whenever the provider has new credentials, if it is one that says so."""
    if not callable(getattr(provider, "on_next", None)):
        return  # it is asked for credentials whenever a connection is made
    with _lock:
        users = _users.setdefault(provider, WeakSet())
        users.add(connections)
    # Do not refer to the provider here: it would then keep itself in memory.
    provider.on_next(lambda token: _renew(users))
    provider.on_error(_failed)


def _renew(users: WeakSet[Any]) -> _Done:
    with _lock:
        connections = list(users)
    for one in connections:
        one.renew()
    return _Done()


def _failed(error: Exception) -> _Done:
    logger.error("The provider of the credentials for Redis has got no new ones: %s", error)
    return _Done()
