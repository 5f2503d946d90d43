"""Find out whether a restart of the server would throw away what the app's scripts have written.

The server writes the commands of a script into its append-only file as one transaction (MULTI … EXEC). Redis 7.0 and
later replay transactions with the rights of the user `default` (redis/redis#14541, valkey-io/valkey#3983). If this user
lacks a right, the server leaves the transaction out, and starts all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redis.exceptions import ResponseError

from ratelimits.doctor.commands import HASH, KEYS, LIST, RENAMED, STRING, ZSET
from ratelimits.doctor.errors import Who, who_asks
from ratelimits.doctor.findings import ServerFinding
from ratelimits.doctor.parts import Part
from ratelimits.doctor.properties import Properties
from ratelimits.doctor.scratch import Scratch, name_of, scratch
from ratelimits.engine.server import Server

#: The first version of Redis that replays with the rights of `default`.
_SINCE = (7, 0)
#: A version of Valkey that was tried, and replays each transaction.
_VALKEY_WITHOUT = (9, 1, 2)
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
_MEND = (
    "Give the user default these rights. If nobody connects as this user, leave it off, but with all rights, also in"
    " the server's configuration: ACL SETUSER default off ~* &* +@all (docs/scaling.md)"
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
            yield _unknown(scratch.keyspace.home, who)
        return
    answers = [reply.decode() if isinstance(reply, bytes) else str(reply) for reply in replies]
    denied = [answer for answer in answers if answer != "OK"]
    if denied:
        yield ServerFinding(
            "replay",
            _THROWN_AWAY,
            "At a restart, the server can throw away what the app has written: it replays transactions of its"
            f" append-only file as the user default, who lacks rights ({len(denied)} of {len(answers)} commands; the"
            f" server says: {denied[0]})",
            _MEND,
        )


def lost_at_restart(server: Server, client: Any, shard: int, said: Properties) -> ServerFinding | None:
    """Return the finding for a server that throws away at a restart what was written; None if it keeps it.

    None also if nobody may ask. This takes one round trip, and nothing is left on the server.
    """
    who, _simulating = who_asks(server, client)
    found = thrown_away(scratch(server, shard), who, said)
    return next((one for one in found if one.name == "replay"), None)


def _may_throw_away(said: Properties) -> bool:
    if said.aof is False or (said.compatible and said.compatible < _SINCE):
        return False
    numbers = tuple(int(part) for part in said.version.split(".") if part.isdigit())
    return said.product != "Valkey" or numbers < _VALKEY_WITHOUT


def _unknown(home: str, who: Who) -> ServerFinding:
    return ServerFinding(
        "replay-unknown",
        frozenset(),
        "Nobody could see whether a restart of the server keeps what the app has written: some versions replay their"
        f" append-only file with the rights of the user default, and the user {who.user} may not ask for them",
        f"As an administrator of the server, ask ACL DRYRUN default HSET {home}a b 1. If the answer is not OK:"
        f" {_MEND[0].lower()}{_MEND[1:]}. To let the doctor ask: {who.right('+acl|dryrun')}",
    )
