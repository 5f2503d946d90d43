"""Try a server: send each command, connect to its address several times, and find out what a restart throws away.

The app's own user sends each command that the app sends, by itself and in a script.

A server writes the commands of a script into its append-only file as one transaction (MULTI … EXEC). Redis 7.0 and
later replay transactions with the rights of the user `default` (redis/redis#14541, valkey-io/valkey#3983). If this user
lacks a right, the server leaves the transaction out, and starts all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError

from ratelimits.conf import conf
from ratelimits.doctor.commands import HASH, KEYS, LIST, RENAMED, STRING, USED, ZSET, Used
from ratelimits.doctor.findings import (
    Part,
    ServerFinding,
    Who,
    installed,
    ledger,
    merged,
    of_command,
    of_refusal,
    who_asks,
)
from ratelimits.doctor.properties import Properties
from ratelimits.doctor.scratch import TIME_TO_LIVE, Scratch, name_of, scratch
from ratelimits.engine import memory
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import read_run, refuses_writes
from ratelimits.engine.transport.refused import Reason, refused

#: Sends one command from a script. The keys come first in ARGV too, where the command needs them.
_SENDS = "return redis.call(unpack(ARGV))"
#: What the server does for the doctor itself: a refusal of these commands is reported by their own tries.
_EXPIRES, _DELETES = "PEXPIRE", "UNLINK"
#: Commands that parts may do without, with these parts. Only a walk shows whether they can.
REPLACEABLE = {f"command:{used.name}": frozenset(used.replaceable) for used in USED if used.replaceable}
#: Commands that only a fence needs. The finding about the fence says everything about them.
OF_FENCES = {f"command:{used.name}" for used in USED if used.fence}
#: How many new connections are asked for their server: a balancer often gives them to its servers in turn.
CONNECTIONS = 8
#: Marks a server. Returns 1 if an earlier connection has marked it. (A full server refuses SET as the first write.)
_MARK = """
redis.pcall('PERSIST', KEYS[1])
local marked = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return marked
"""
#: The first version of Redis that replays with the rights of `default`.
_REPLAYS_SINCE = (7, 0)
#: A version of Valkey that was tried, and replays each transaction.
_REPLAYS_ALL = (9, 1, 2)
#: What a restart throws away: states of limits, and usage. (What is restored comes from the ledger.)
_THROWN_AWAY = frozenset({Part.LIMITS, Part.LOGS, Part.LEASES, Part.COUNTS, Part.BILLS})
#: The writing commands of the app's scripts, as they are in the file.
WRITES = (
    ("SET", STRING, "1"),
    ("PEXPIREAT", STRING, "1"),
    ("PERSIST", STRING),
    ("RENAME", STRING, RENAMED),
    ("RENAMENX", STRING, RENAMED),
    ("HSET", HASH, "a", "1"),
    ("HINCRBY", HASH, "n", "1"),
    ("HDEL", HASH, "n"),
    ("RPUSH", LIST, "a"),
    ("LSET", LIST, "0", "a"),
    ("LREM", LIST, "1", "b"),
    ("LTRIM", LIST, "0", "5"),
    ("RPOP", LIST),
    ("ZADD", ZSET, "1", "a"),
    ("ZREM", ZSET, "a"),
    ("UNLINK", STRING),
)
_MEND_OF_DEFAULT = (
    "Give the user default these rights. If nobody connects as this user, leave it off, but with all rights, also in"
    " the server's configuration: ACL SETUSER default off ~* &* +@all (docs/scaling.md)"
)


def keys_would_stay(scratch: Scratch, who: Who) -> list[ServerFinding]:
    """Return a finding for each command that ends a Redis key, if the server refuses all of them.

    Then the doctor must write nothing: its keys would stay for ever. So nobody knows what works.
    """
    key = scratch.key(name_of(STRING))  # nothing has written it yet
    with scratch.client.pipeline(transaction=False) as pipeline:
        pipeline.execute_command(_EXPIRES, key, TIME_TO_LIVE)
        pipeline.execute_command(_DELETES, key)
        replies = pipeline.execute(raise_on_error=False)
    refusals = [
        finding
        for command, reply in zip((_EXPIRES, _DELETES), replies, strict=True)
        if isinstance(reply, ResponseError) and (found := refused(reply, command, who.keys)) is not None
        if found.reason is not Reason.KEY  # a user who may not touch the keys cannot write them either
        for finding in [of_refusal(found, frozenset(installed()), who)]
    ]
    if len(refusals) < len(replies):
        return []
    nothing_tried = " Without PEXPIRE and UNLINK the doctor would leave keys, so it tried nothing else."
    return [replace(one, why=f"{one.why.removesuffix('.')}.{nothing_tried}") for one in refusals]


def refused_keys(scratch: Scratch, simulating: Who) -> list[ServerFinding]:
    """Return a finding if the user may not touch the Redis keys of simulations. (`refusals` tries the project's.)"""
    home = scratch.keyspace.home
    # The same part in braces, so that a node of a cluster has this key.
    key = f"{simulating.keys.removeprefix('~').removesuffix('*')}doctor:{home[home.index('{') :]}"
    try:
        scratch.client.exists(key)
    except ResponseError as error:
        found = of_command(error, "EXISTS", frozenset({Part.TRIES}), simulating)
        return [found] if found is not None and found.name.startswith("keys:") else []
    return []


def refused_commands(server: Server, client: Any, shard: int) -> list[ServerFinding]:
    """Return a finding for each command that the server refuses, with the parts that cannot do without it.

    This takes three round trips, since no part is walked. Nothing is left on the server.
    """
    place = scratch(server, shard)
    try:
        who, _simulating = who_asks(server, client)
        found = keys_would_stay(place, who)
        found = found or refusals(place, who, cluster=isinstance(server.wire, ClusterWire))
    finally:
        place.clean()
    return [
        replace(
            one,
            parts=one.parts - REPLACEABLE.get(one.name, frozenset()),
            mend=f"{one.mend.removesuffix('.')}. {ledger.another_fence()}" if one.name in OF_FENCES else one.mend,
        )
        for one in found
    ]


def refusals(scratch: Scratch, who: Who, *, cluster: bool) -> list[ServerFinding]:
    """Return a finding for each command that the server refuses, with the parts that need it."""
    known = frozenset(installed())
    sent = [used for used in USED if (cluster or not used.cluster) and used.fence in ("", conf.FENCE)]
    alone = [used for used in sent if known.intersection(used.alone)]
    found = list(_found(_sent(scratch, alone, _by_itself), lambda used: known.intersection(used.alone), who))
    # Without EVAL no script can be tried. But a right for a command is the same in a script and by itself.
    written = _by_itself if any(one.name == "command:EVAL" for one in found) else _in_script
    in_scripts = [used for used in USED if known.intersection(used.in_scripts)]
    found += _found(_sent(scratch, in_scripts, written), lambda used: known.intersection(used.in_scripts), who)
    return list(merged(found))


def _found(
    replies: Iterable[tuple[Used, Any]], parts_of: Callable[[Used], frozenset[Part]], who: Who
) -> Iterator[ServerFinding]:
    for used, reply in replies:
        if not isinstance(reply, ResponseError):
            continue
        if memory.is_refusal(reply):
            continue  # the app's scripts write in another way when the memory is full: only the walks show what works
        # Any other error comes from an earlier refusal: for example, LSET finds no list if RPUSH was refused.
        if (finding := of_command(reply, used.name, parts_of(used), who)) is not None:
            yield finding


def _sent(scratch: Scratch, commands: Sequence[Used], written: Any) -> Iterator[tuple[Used, Any]]:
    """Yield each command with its reply, which can be an error.

    All commands go in one round trip, with commands that let the keys expire and delete them. So the server gets all of
    them, or the doctor was killed before any.
    """
    with scratch.client.pipeline(transaction=False) as pipeline:
        for used in commands:
            pipeline.execute_command(*written(scratch, used))
            for key in _keys(scratch, used):
                pipeline.execute_command(_EXPIRES, key, TIME_TO_LIVE)
        pipeline.execute_command(_DELETES, *(scratch.key(name_of(key)) for key in KEYS))
        replies = iter(pipeline.execute(raise_on_error=False))
    for used in commands:
        yield used, next(replies)
        for _key in _keys(scratch, used):
            next(replies)


def _keys(scratch: Scratch, used: Used) -> list[str]:
    return [scratch.key(name_of(argument)) for argument in used.arguments if argument in KEYS]


def _arguments(scratch: Scratch, used: Used) -> list[str]:
    return [scratch.key(name_of(one)) if one in KEYS else one for one in used.arguments]


def _by_itself(scratch: Scratch, used: Used) -> list[str]:
    return [used.name, *_arguments(scratch, used)]


def _in_script(scratch: Scratch, used: Used) -> list[str]:
    keys = _keys(scratch, used)
    return ["EVAL", _SENDS, str(len(keys)), *keys, used.name, *_arguments(scratch, used)]


def behind_address(scratch: Scratch) -> Iterator[ServerFinding]:
    """Yield a finding if the address leads to a replica or to several servers.

    Each connection writes a mark that the next ones find on the same server: it needs no INFO, and no proxy can hide
    it. Do not ask this of a cluster: each node has an address of its own, and the app asks which nodes are primaries.
    """
    pool, replicas, runs, unmarked = scratch.client.connection_pool, 0, set(), 0
    key, clients = scratch.key("address"), list[redis.Redis]()
    with ExitStack() as stack:
        for _number in range(CONNECTIONS):  # all stay open, so each is another connection
            client = stack.enter_context(redis.Redis(connection_pool=pool, single_connection_client=True))
            stack.callback(pool.disconnect, inuse_connections=False)
            clients.append(client)
            runs.add(read_run(client, key))
            try:
                unmarked += client.eval(_MARK, 1, key, TIME_TO_LIVE) == 0
            except ResponseError as error:
                replicas += refuses_writes(error)
        for client in clients:
            with suppress(RedisError, OSError):
                client.unlink(key)
    # A user who may not write has no marks. Then the runs differ.
    servers = max(len(runs), unmarked)
    if replicas:
        share = "is a read-only replica" if replicas == CONNECTIONS else "leads also to a read-only replica"
        yield ServerFinding(
            "replica",
            frozenset(installed()),
            f"The server's address {share}: {replicas} of {CONNECTIONS} connections could not write. Requests on such a"
            " connection are not decided: the failure policies answer.",
            "Name the address of the primary in CACHES, or use Sentinel. Replicas cannot decide limits.",
        )
    elif servers > 1:
        yield ServerFinding(
            "several",
            frozenset(installed()),
            f"The server's address leads to {servers} different servers: each of them counts its own limits.",
            "Name the address of one server in CACHES, or a Redis Cluster.",
        )


def thrown_away(scratch: Scratch, who: Who, said: Properties | None) -> Iterator[ServerFinding]:
    """Yield a finding if a restart throws away what was written, or if the user may not ask (ACL DRYRUN)."""
    if who.user == "default" or (said is not None and not _may_throw_away(said)):
        return
    # These keys are only named: the server executes nothing.
    commands = [[scratch.key(name_of(one)) if one in KEYS else one for one in command] for command in WRITES]
    with scratch.client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command("ACL DRYRUN", "default", *command)
        replies = pipeline.execute(raise_on_error=False)
    if any(isinstance(reply, ResponseError) for reply in replies):
        if said is not None and said.product:  # perhaps a server that hides its version replays all
            yield _cannot_ask(scratch.keyspace.home, who)
        return
    answers = [reply.decode() if isinstance(reply, bytes) else str(reply) for reply in replies]
    denied = [answer for answer in answers if answer != "OK"]
    if denied:
        yield ServerFinding(
            "replay",
            _THROWN_AWAY.intersection(installed()),
            "At a restart, the server can throw away what the app has written: it replays transactions of its"
            f" append-only file as the user default, who lacks rights ({len(denied)} of {len(answers)} commands; the"
            f" server says: {denied[0]})",
            _MEND_OF_DEFAULT,
        )


def lost_at_restart(server: Server, client: Any, shard: int, said: Properties) -> ServerFinding | None:
    """Return the finding for a server that throws away at a restart what was written; None if it keeps it.

    None also if nobody may ask. This takes one round trip, and nothing is left on the server.
    """
    who, _simulating = who_asks(server, client)
    found = thrown_away(scratch(server, shard), who, said)
    return next((one for one in found if one.name == "replay"), None)


def _may_throw_away(said: Properties) -> bool:
    if said.aof is False or (said.compatible and said.compatible < _REPLAYS_SINCE):
        return False
    numbers = tuple(int(part) for part in said.version.split(".") if part.isdigit())
    return said.product != "Valkey" or numbers < _REPLAYS_ALL


def _cannot_ask(home: str, who: Who) -> ServerFinding:
    return ServerFinding(
        "replay-unknown",
        frozenset(),
        "Nobody could see whether a restart of the server keeps what the app has written: some versions replay their"
        f" append-only file with the rights of the user default, and the user {who.user} may not ask for them",
        f"As an administrator of the server, ask ACL DRYRUN default HSET {home}a b 1. If the answer is not OK:"
        f" {_MEND_OF_DEFAULT[0].lower()}{_MEND_OF_DEFAULT[1:]}. To let the doctor ask: {who.right('+acl|dryrun')}",
    )
