"""Restrictions of servers: each as what is done to a real server, and what the doctor must then find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from django.test import override_settings
from django_redis.pool import ConnectionFactory

from ratelimits.doctor.commands import rights
from ratelimits.doctor.findings import Part
from ratelimits.engine.server import current_server

L, G, C, U, B, R, W, E, T = Part
#: The rights of a user without restrictions.
ALL = ("~rl:1:test*", "~rl:1:simulate-*", *rights())
USER, PASSWORD = "restricted", "secret"


@contextmanager
def user(admin: redis.Redis, *acl: str) -> Iterator[None]:
    """Make a user with these rights and no others."""
    admin.execute_command("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *acl)
    try:
        yield
    finally:
        admin.execute_command("ACL", "DELUSER", USER)


@contextmanager
def settings_of_server(admin: redis.Redis, **values: str) -> Iterator[None]:
    """Change settings of the server."""
    names = {name: name.replace("_", "-") for name in values}
    former: dict[str, Any] = {name: admin.config_get(option)[option] for name, option in names.items()}
    try:
        for name, value in values.items():
            admin.config_set(names[name], value)
        yield
    finally:
        for name, value in former.items():
            admin.config_set(names[name], value)


@contextmanager
def connected(url: str, username: str = "", password: str = PASSWORD) -> Iterator[None]:
    """Let the app connect to a server, as a user."""
    place: dict[str, Any] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": {}}
    if username:
        place["LOCATION"] = url.replace("redis://", f"redis://{username}:{password}@")
    known = set(ConnectionFactory._pools)
    with override_settings(CACHES={"ratelimits": place, "default": place}):
        yield
        current_server().wire.client.close()
    for url in set(ConnectionFactory._pools) - known:
        ConnectionFactory._pools.pop(url).disconnect()


#: What the user may not do; the name of the finding; the parts that fail at least, and at most; what mends it.
#: Between the two are parts that work if the app finds another way.
ACLS: dict[str, tuple[tuple[str, ...], str, set[Part], set[Part], str]] = {
    "no CONFIG": (("-config",), "fence", {B}, {B}, "+config|get"),
    "no INFO": (("-info",), "command:INFO", {B, R}, {B, R}, "+info"),
    "no SCRIPT": (("-script",), "command:SCRIPT LOAD", set(), set(), "+script|load"),
    "no EVAL": (("-eval",), "command:EVAL", {B, E, W, T}, {B, E, W, T}, "+eval"),
    "no EVALSHA": (("-evalsha",), "command:EVALSHA", set(), set(Part), "+evalsha"),
    "no HSET": (("-hset",), "command:HSET", {G, U, B, R, T}, {G, U, B, R, T}, "+hset"),
    "no ZADD": (("-zadd",), "command:ZADD", {L, C}, {L, C}, "+zadd"),
    "no LINDEX": (("-lindex",), "command:LINDEX", {G}, {G}, "+lindex"),
    "no BLPOP": (("-blpop",), "command:BLPOP", {W}, {W}, "+blpop"),
    "no MGET": (("-mget",), "command:MGET", {L, G, C, U, B, R, T}, {L, G, C, U, B, R, T}, "+mget"),
    "no UNLINK": (("-unlink",), "command:UNLINK", {L, G, C, B, T}, {L, G, C, B, T}, "+unlink"),
    "no DUMP": (("-dump",), "command:DUMP", set(), set(), "+dump"),
    "other keys": (("resetkeys", "~shop:*"), "keys:~rl:1:test:*", set(Part) - {W}, set(Part), "~rl:1:test:*"),
    "only the namespace": (("resetkeys", "~rl:1:test:*"), "keys:~rl:1:simulate-*", {T}, {T}, "~rl:1:simulate-*"),
}
#: Settings of the server; the name of the finding; the parts that fail; a part of what mends it.
SETTINGS: dict[str, tuple[dict[str, str], str, set[Part], str]] = {
    "evicts": ({"maxmemory_policy": "allkeys-lru"}, "evicts", {L, G, C, U, B, R}, "maxmemory-policy noeviction"),
    "evicts what has a time to live": (
        {"maxmemory_policy": "volatile-lru"},
        "evicts",
        {L, G, C},
        "maxmemory-policy noeviction",
    ),
    "no append-only file": ({"appendonly": "no"}, "append-only", {B, R}, "appendonly yes"),
    "no fsync": ({"appendfsync": "no"}, "fence", {B}, "docs/billing/pipeline.md"),
    "full": ({"maxmemory": "1mb"}, "full", {T}, "maxmemory"),
}


class Hosted(NamedTuple):
    """A hosted server, as its public documentation describes it. docs/servers.md names the pages and says what works.

    denied    what its users may not send. They may send everything else
    fence     the value of RATELIMITS["FENCE"] that fits
    settings  settings of the server
    keyless   whether scripts without a Redis key are refused
    """

    denied: str
    fence: str
    settings: dict[str, str] = {}
    keyless: bool = False


_AWS = "-bgrewriteaof -bgsave -config -debug -migrate -replicaof -save -slaveof -shutdown -sync"
_OCI = "-acl -bgrewriteaof -bgsave -cluster -config +config|get -debug -migrate -module -psync -replicaof -save -sync"
#: The emulated rows of the table in docs/servers.md, by their names.
HOSTED = {
    "Amazon ElastiCache, nodes": Hosted(_AWS, "window", {"appendonly": "no"}),
    "Amazon ElastiCache Serverless": Hosted(_AWS, "window", {"appendonly": "no"}, keyless=True),
    "Amazon MemoryDB": Hosted(f"{_AWS} -acl -module -psync", "durable"),
    "Google Memorystore for Redis": Hosted(
        "-acl -bgrewriteaof -bgsave -client -cluster -command -config -debug -lastsave -migrate -monitor -object",
        "window",
    ),
    "Google Memorystore for Valkey": Hosted("-config", "window", {"maxmemory_policy": "volatile-lru"}),
    "Aiven for Valkey": Hosted(
        "-acl -bgrewriteaof -bgsave -cluster -command -config -debug -failover -lastsave -migrate -monitor", "window"
    ),
    "Redis Cloud and Azure Managed Redis": Hosted("-acl -config", "window"),
    "Oracle OCI Cache, not sharded": Hosted(_OCI, "aof"),
    "Oracle OCI Cache, sharded": Hosted(f"{_OCI} -eval -evalsha -script", "durable"),
}
