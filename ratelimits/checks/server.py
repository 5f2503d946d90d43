"""System checks of the Redis server: what `ratelimits_doctor` finds, and the options with which the app connects.

A refused command needs no broken server: hosted servers refuse some commands to everybody.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import transaction
from django.utils.module_loading import import_string
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from ratelimits.conf import conf, embedded
from ratelimits.django_redis_cluster import ConnectionFactory
from ratelimits.doctor.diagnosis import ServerDiagnosis, diagnose
from ratelimits.doctor.findings import ALWAYS, Part, ServerFinding, more_memory, needed
from ratelimits.embedded import ServerStartError
from ratelimits.engine import Unavailable, memory
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.wire import try_options, try_options_of_async_code
from ratelimits.models import Rule

#: The ids of findings: if the project needs what does not work, and if it does not. "" if there is no message.
_IDS = {
    "command": ("E046", "W046"),
    "keys": ("E046", "W046"),
    "fence": ("E047", "W049"),
    "replica": ("E048", "E048"),
    "several": ("E048", "E048"),
    "append-only": ("W030", "W030"),
    "evicts": ("E055", "W031"),
    "replay": ("E054", "W054"),
    # Hosted servers allow nobody to ask: only the doctor says it.
    "replay-unknown": ("", ""),
    "policy-unknown": ("W047", "W047"),
    # Nobody can mend it where INFO is refused: only the doctor says it.
    "memory-unknown": ("", ""),
    "not-written": ("E051", "W050"),
    # If all works, W040 and W041 say it.
    "full": ("E051", ""),
    "nearly-full": ("", ""),
    "connection": ("E053", "E053"),
    # The server answers, but not always: it is busy.
    "lost": ("", ""),
}
#: The ids of all other findings, such as a server that is too old.
_OTHERS = ("E050", "W051")
#: Commands that run these checks but need no server, whatever is wrong with it. An error would stop them.
_WITHOUT_SERVER = (["migrate"], ["test"])


@checks.register("ratelimits", checks.Tags.database)
def check_redis_server(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Report what does not work on the server, and why. Do nothing without `--database`, nor in `migrate`."""
    try:
        if not databases or conf.DATABASE not in databases or sys.argv[1:2] in _WITHOUT_SERVER:
            return []
        found = _unread_tables()
        # Without tables there is no rule yet.
        parts = frozenset(ALWAYS) if found else needed()
        return [*found, *_asked(parts)]
    except ImproperlyConfigured:
        return []  # another check reports the settings


@checks.register("ratelimits", checks.Tags.database)
def check_memory(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Warn before the memory of a server is full, and say what the app does then. Do nothing without `--database`."""
    try:
        return [*_short_memory()] if conf.DATABASE in (databases or ()) else []
    except (RedisError, Unavailable, ServerStartError, OSError, ImproperlyConfigured):
        return []  # another check reports the server or the settings


def _short_memory() -> Iterator[checks.CheckMessage]:
    server = current_server()
    uses = []
    for client, _shards in server.wire.servers(server.keyspace, range(server.keyspace.shards)):
        with suppress(ResponseError):  # the doctor says that INFO is refused
            uses.append(memory.use_of(client.info("memory")))
    share = max((use.share for use in uses if use is not None), default=0.0)
    starts = memory.starts()
    if share >= starts[memory.Shortage.SHORT]:
        yield checks.Warning(
            f"A Redis server uses {share:.0%} of its maxmemory: all new addresses share one count.",
            hint=more_memory(),
            id="ratelimits.W041",
        )
    elif share >= starts[memory.Shortage.NEAR]:
        yield checks.Warning(
            f"A Redis server uses {share:.0%} of its maxmemory: new addresses of a network share one count.",
            hint=more_memory(),
            id="ratelimits.W040",
        )


def _unread_tables() -> list[checks.CheckMessage]:
    """Return a warning if the tables cannot be read: then no check of rows, rules and usage says anything."""
    try:
        with transaction.atomic(conf.DATABASE):
            Rule.objects.using(conf.DATABASE).exists()
    except DatabaseError as error:
        return [
            checks.Warning(
                f"The app's tables cannot be read, so no rule and no usage was checked: {error}",
                hint="Run `manage.py migrate`. If this does not help, look at the database.",
                id="ratelimits.W055",
            )
        ]
    return []


def _asked(parts: Collection[Part]) -> list[checks.CheckMessage]:
    try:
        return [message for one in diagnose() for message in _messages(one, parts)]
    except (Unavailable, RedisConnectionError, OSError) as error:
        return [_away(error)]
    except (DatabaseError, RedisError, ServerStartError, ImproperlyConfigured):
        return []  # Another check reports the settings.


def _away(error: Exception) -> checks.Error:
    """Return the error for a cluster of which no node answers."""
    return checks.Error(
        f"The server does not answer: {type(error).__name__}: {error}",
        hint="Look at the LOCATION of the cache, at the network, and at RATELIMITS['TIMEOUT']."
        f" The server is {_alias()}.",
        id="ratelimits.E053",
    )


def _alias() -> str:
    return "embedded" if embedded.is_needed() else f"the cache alias {conf.CACHE_ALIAS!r}"


def _messages(one: ServerDiagnosis, parts: Collection[Part]) -> Iterator[checks.CheckMessage]:
    for found in one.findings:
        if message := _message(one, found, parts):
            yield message


def _message(one: ServerDiagnosis, found: ServerFinding, parts: Collection[Part]) -> checks.CheckMessage | None:
    stopped = [part for part in Part if part in found.parts and part in parts]
    # What works now, but can lose what it has written, is an error only where money is at stake.
    is_serious = Part.BILLS in stopped if found.endangers else bool(stopped)
    name = _IDS.get(found.name.partition(":")[0], _OTHERS)[0 if is_serious else 1]
    if not name:
        return None
    kind = checks.Error if name.startswith("E") else checks.Warning
    without = (
        f" It {'endangers' if found.endangers else 'stops'}: {', '.join(part.meaning for part in stopped)}."
        if stopped
        else ""
    )
    return kind(
        f"{found.why.removesuffix('.')}.{without}",
        hint=f"{found.mend.removesuffix('.')}. The server is {one.address} ({_alias()});"
        " `manage.py ratelimits_doctor` says more.",
        id=f"ratelimits.{name}",
    )


@checks.register("ratelimits")
def check_connections(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Report options of the cache alias with which no connection can be made, whatever the server does."""
    try:
        alias, timeout = conf.CACHE_ALIAS, conf.TIMEOUT
        if embedded.is_needed():
            return []
    except ImproperlyConfigured:
        return []  # `check_settings` reports the invalid setting
    cache = settings.CACHES.get(alias, {})
    try:
        if not _can_be_tried(cache):
            return []
        try_options(alias, timeout)
    except (RedisError, ImproperlyConfigured, ImportError, TypeError, ValueError) as error:
        return [
            checks.Error(
                f"With the options of the cache {alias!r}, no connection to Redis can be made: {error}",
                hint=f"Each request would raise this error. {_mend(cache)}",
                id="ratelimits.E043",
            )
        ]
    try:
        try_options_of_async_code(alias, timeout)
    except ImproperlyConfigured:
        pass  # each async request raises it
    except (RedisError, TypeError, ValueError) as error:
        return [
            checks.Warning(
                f"With the options of the cache {alias!r}, async code cannot connect to Redis: {error}",
                hint="The failure policies would answer all async requests. Leave this option out.",
                id="ratelimits.W057",
            )
        ]
    return []


def _mend(cache: dict[str, Any]) -> str:
    if "SENTINELS" in cache.get("OPTIONS", {}) and str(cache.get("LOCATION")).startswith("rediss:"):
        return (
            "With Sentinel, begin LOCATION with redis:// and write 'ssl': True into CONNECTION_POOL_KWARGS and"
            " SENTINEL_KWARGS (docs/scaling.md#sentinel)."
        )
    return "Correct OPTIONS or LOCATION of this alias in CACHES."


def _can_be_tried(cache: dict[str, Any]) -> bool:
    """Return whether this is a cache of django-redis whose client does not connect when it is made.

    The client of a cluster connects. Raise ImportError if the connection factory does not exist.
    """
    if not str(cache.get("BACKEND", "")).startswith("django_redis."):
        return False
    path = cache.get("OPTIONS", {}).get("CONNECTION_FACTORY")
    factory = None if path is None else import_string(path)
    return not (isinstance(factory, type) and issubclass(factory, ConnectionFactory))
