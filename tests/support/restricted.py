"""Let the app use a server as a user with fewer rights, as hosted servers give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import redis
from django.test import override_settings
from django_redis.pool import ConnectionFactory

from ratelimits import rules
from ratelimits.engine.server import current_server

USER, PASSWORD = "restricted", "secret"
#: Each right, as most hosted servers begin with.
EVERYTHING = ("~*", "&*", "+@all")


@contextmanager
def user_of(clients: Sequence[redis.Redis], *rights: str) -> Iterator[None]:
    """Make a user on each of these servers: one with all rights, to which `rights` (as in ACL SETUSER) are applied."""
    for client in clients:
        client.execute_command("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *EVERYTHING, *rights)
    try:
        yield
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", USER)


def as_user(url: str) -> str:
    """Return the URL with the name and password of the restricted user."""
    return url.replace("redis://", f"redis://{USER}:{PASSWORD}@")


@contextmanager
def reached_by(url: str) -> Iterator[None]:
    """Point the app's cache aliases to this URL in the block, and close the connections afterwards."""
    place: dict[str, Any] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    known = set(ConnectionFactory._pools)
    with ExitStack() as stack:
        stack.enter_context(override_settings(CACHES={"ratelimits": place, "default": place}))
        rules.forget()
        try:
            yield
        finally:
            current_server().wire.client.close()
            for opened in set(ConnectionFactory._pools) - known:
                ConnectionFactory._pools.pop(opened).disconnect()
            rules.forget()


@contextmanager
def restricted(client: redis.Redis, url: str, *rights: str) -> Iterator[None]:
    """Let the app use this server as a user with all rights, to which `rights` are applied."""
    with user_of([client], *rights), reached_by(as_user(url)):
        yield
