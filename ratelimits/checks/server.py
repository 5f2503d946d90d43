"""System checks of what the Redis server lets the app do: refused commands, servers behind one address, the fence.

A refused command needs no broken server: hosted servers refuse some commands to everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import redis
from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from ratelimits.conf import conf
from ratelimits.embedded import ServerStartError
from ratelimits.engine import Unavailable
from ratelimits.engine.refused import Reason, RefusedCommand, refused
from ratelimits.engine.run import SCRIPT, read_run
from ratelimits.engine.server import Server, current_server, shards_can_move
from ratelimits.engine.transport.connection import refuses_writes
from ratelimits.models import Rule
from ratelimits.usage.fence import NoFileError, NotFencedError, check_server

#: How many new connections are asked for their server: a balancer often gives them to its servers in turn.
_CONNECTIONS = 8


class _Try(NamedTuple):
    """A command to try, and what does not work without it. `needed` is false if the app works without it."""

    command: str
    send: Callable[[redis.Redis, str], Any]
    without: str
    needed: bool = True


def _write(client: redis.Redis, key: str) -> Any:
    return client.eval("return redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])", 1, key, "60000")


_NOTHING_DECIDED = "No request is decided: the failure policies answer."
#: What is tried, with a Redis key of the app that a drain writes too (`Keyspace.fence`).
_TRIES = (
    _Try("INFO", lambda client, _key: client.info(), "The app does not notice that the server restarts or is full."),
    _Try("EVAL", lambda client, _key: client.eval("return 1", 0), "No usage reaches the ledger."),
    _Try("EVALSHA", lambda client, _key: client.evalsha("0" * 40, 0), _NOTHING_DECIDED),
    _Try("SET", _write, _NOTHING_DECIDED),
    _Try(
        "SCRIPT LOAD",
        lambda client, _key: client.script_load(SCRIPT.text.decode()),
        "The app sends the whole text of a script instead, whenever the server has forgotten the script.",
        needed=False,
    ),
)


@checks.register("ratelimits", checks.Tags.database)
def check_redis_server(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Report what the server refuses, and whether batches can be fenced on it. Do nothing without `--database`."""
    found: list[checks.CheckMessage] = []
    # A server that is away is no matter of a check: report what was found before. Other checks report the settings.
    with suppress(DatabaseError, RedisError, Unavailable, ServerStartError, OSError, ImproperlyConfigured):
        if not databases or conf.DATABASE not in databases:
            return []
        server = current_server()
        found += _check_other_servers(server)
        for client, shards in server.wire.servers(server.keyspace, range(server.keyspace.shards)):
            refusals = _refusals(client, server.keyspace.fence(shards[0]))
            found += [_refusal_message(client, tried, refusal) for tried, refusal in refusals]
            found += _check_fence(server, client, shards[0])
    return found


def _refusals(client: redis.Redis, key: str) -> Iterator[tuple[_Try, RefusedCommand]]:
    pattern = f"~{key.partition('{')[0]}*"
    for tried in _TRIES:
        try:
            tried.send(client, key)
        except NoScriptError:
            continue  # EVALSHA of a script that nobody has: the command is allowed
        except ResponseError as error:
            refusal = refused(error, tried.command, pattern)
            if refusal is not None:
                yield tried, refusal


def _refusal_message(client: redis.Redis, tried: _Try, refusal: RefusedCommand) -> checks.CheckMessage:
    options = client.connection_pool.connection_kwargs
    place, user = _place(client), options.get("username") or "default"
    what = f"refuses the Redis keys {refusal.acl[1:]}" if refusal.reason is Reason.KEY else f"refuses {refusal.command}"
    hint = f"Let the server's administrator run `ACL SETUSER {user} {refusal.acl}`."
    if refusal.reason is Reason.MISSING:
        hint = "The command is disabled or renamed: its provider or its configuration (rename-command) must allow it."
    kind = checks.Error if tried.needed else checks.Warning
    return kind(
        f"The Redis server {place} {what}: {refusal.error}. {tried.without}",
        hint=hint,
        id=f"ratelimits.{'E' if tried.needed else 'W'}046",
    )


def _place(client: redis.Redis) -> str:
    options = client.connection_pool.connection_kwargs
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _check_other_servers(server: Server) -> Iterator[checks.CheckMessage]:
    """Report that new connections to the one address come to a replica, or to different servers.

    In a cluster, each node has an address of its own, and the app asks which nodes are primaries.
    """
    if shards_can_move():
        return
    pool, replicas, runs = server.wire.client.connection_pool, 0, set()
    with ExitStack() as stack:
        for _number in range(_CONNECTIONS):  # all stay open, so each is another connection
            client = stack.enter_context(redis.Redis(connection_pool=pool, single_connection_client=True))
            stack.callback(pool.disconnect, inuse_connections=False)
            runs.add(read_run(client))
            try:
                _write(client, server.keyspace.fence(0))
            except ResponseError as error:
                replicas += refuses_writes(error)
    place = _place(server.wire.client)
    if replicas:
        share = "is a read-only replica" if replicas == _CONNECTIONS else "leads also to a read-only replica"
        yield checks.Error(
            f"The Redis address {place} {share}: {replicas} of {_CONNECTIONS} connections could not write. Requests on"
            " such a connection are not decided: the failure policies answer.",
            hint="Name the address of the primary in CACHES, or use Sentinel. Replicas cannot decide limits.",
            id="ratelimits.E048",
        )
    elif len(runs) > 1:
        yield checks.Error(
            f"The Redis address {place} leads to {len(runs)} different servers: each of them counts its own limits.",
            hint="Name the address of one server in CACHES, or a Redis Cluster.",
            id="ratelimits.E048",
        )


def _check_fence(server: Server, client: redis.Redis, shard: int) -> Iterator[checks.CheckMessage]:
    """Report that no drain can write usage to the ledger, because the fence does not hold on this server."""
    try:
        check_server(server, read_run(client), shard)
    except NoFileError:
        return  # ratelimits.W030 says so
    except NotFencedError as error:
        bills = Rule.objects.using(conf.DATABASE).filter(bills=True).exists()
        kind = checks.Error if bills else checks.Warning
        yield kind(
            f"No usage will be written to the ledger: {error}.",
            hint=f"RATELIMITS['FENCE'] is {conf.FENCE!r}. docs/billing/pipeline.md says which value fits which server.",
            id=f"ratelimits.{'E047' if bills else 'W049'}",
        )
