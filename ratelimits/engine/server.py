"""The server and the keys that the settings name: where decisions are made unless somebody says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from django.core.signals import setting_changed

from ratelimits.conf import conf
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.wire import Wire


@dataclass(frozen=True, slots=True)
class Server:
    """A way to a server, and how its keys are named."""

    wire: Wire
    keyspace: Keyspace


@cache
def server() -> Server:
    """The server of RATELIMITS["CACHE_ALIAS"], in RATELIMITS["NAMESPACE"]; made anew after a change of settings."""
    return Server(Wire(conf.CACHE_ALIAS, conf.TIMEOUT), Keyspace(conf.NAMESPACE, conf.SHARDS))


def _forget(*, setting: str, **kwargs: object) -> None:
    if setting in ("RATELIMITS", "CACHES"):
        server.cache_clear()


setting_changed.connect(_forget)
