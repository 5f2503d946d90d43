"""Connect with credentials that expire (tokens of IAM or Entra ID), and replace connections that have old ones."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from redis.exceptions import AuthenticationError

logger = logging.getLogger(__name__)


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
