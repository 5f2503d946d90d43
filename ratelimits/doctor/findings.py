"""The parts of the app that a server lets work or not, what the project needs, and why parts do not work.

A server's error becomes a finding: which command the server refused, and what would change it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from django.db import DatabaseError
from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ratelimits.algorithms.limits import Lasting
from ratelimits.conf import conf
from ratelimits.engine import memory
from ratelimits.engine.keys import SCHEMA
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.refused import Reason, RefusedCommand, refused
from ratelimits.models import Rule


class Part(StrEnum):
    """A part of the app that needs commands of the server. `installed` returns those that are installed."""

    LIMITS = "limits"
    LOGS = "sliding_log"
    LEASES = "concurrency"
    COUNTS = "counts"
    BILLS = "bills"
    RESTORES = "restores"
    WAITS = "waits"
    EDITS = "edits"
    TRIES = "tries"

    @property
    def meaning(self) -> str:
        """Return what the part does, for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Part.LIMITS: "decide requests by most algorithms",
    Part.LOGS: "decide requests by the algorithm sliding_log",
    Part.LEASES: "decide requests by the algorithm concurrency",
    Part.COUNTS: "count usage",
    Part.BILLS: "bring the counted usage to the ledger, from which bills are made",
    Part.RESTORES: "restore counts from the ledger after the server has lost them",
    Part.WAITS: "let outbound calls wait until a lease is released",
    Part.EDITS: "apply an edit of the rules at once, in all processes",
    Part.TRIES: "try a rule before it is saved (the admin, ratelimits_simulate)",
}


#: The parts that need no ledger.
_OF_LIMITS = frozenset({Part.LIMITS, Part.LOGS, Part.LEASES, Part.WAITS, Part.EDITS, Part.TRIES})


@dataclass(slots=True)
class Ledger:
    """What the doctor asks the floor of usage: nothing, until that floor installs its own functions.

    walks          by part: goes the whole way of the part on the doctor's Redis keys (a `Scratch`)
    failures       what these functions raise if the part does not work
    of_fence       takes such an error, the Redis keys, the user of the app (`Who`), and the rights for commands that
                   the fence would have sent later. Returns the finding if the error is about the fence, else None
    another_fence  returns what to do where nobody can change the server
    other_fences   takes the Redis keys, and returns a sentence about the other values of RATELIMITS["FENCE"]
    """

    walks: Mapping[Part, Callable[[Any], None]] = field(default_factory=dict)
    failures: tuple[type[Exception], ...] = ()
    of_fence: Callable[[Exception, Any, Any, Sequence[str]], ServerFinding | None] = lambda *_asked: None
    another_fence: Callable[[], str] = str
    other_fences: Callable[[Any], str] = lambda _keys: ""


ledger = Ledger()


def installed() -> tuple[Part, ...]:
    """Return the parts that are installed, in the order in which they are tried and shown."""
    return tuple(part for part in Part if part in _OF_LIMITS or part in ledger.walks)


def more_memory() -> str:
    """Return what to do if the memory is full, or soon is."""
    if Part.COUNTS not in installed():
        return "Raise the server's maxmemory."
    return (
        "If usage waits in Redis, drain it now: run a worker, or the commands ratelimits_seal and ratelimits_drain. If"
        " none waits, raise the server's maxmemory."
    )


#: The algorithms that need commands of their own.
_WITH_OWN_COMMANDS = {"sliding_log": Part.LOGS, "concurrency": Part.LEASES}


#: What each project needs of the installed parts, also one without a rule.
ALWAYS = (Part.LIMITS, Part.COUNTS, Part.EDITS)


def needed() -> frozenset[Part]:
    """Return the parts that the project's rules, settings and code need. If the rules cannot be read: all but TRIES.

    Parts that are not installed are left out.
    """
    found = {*ALWAYS}
    if "ratelimits.outbound" in sys.modules:
        # Rates of outbound calls are in code. They can have any algorithm.
        found |= {Part.LOGS, Part.LEASES, Part.WAITS}
    try:
        for rule in Rule.objects.using(conf.DATABASE).exclude(mode=Rule.Mode.OFF).select_related("plan"):
            if part := _WITH_OWN_COMMANDS.get(rule.algorithm):
                found.add(part)
            if rule.bills:
                found.add(Part.BILLS)
            if rule.restored() is not Lasting.NO:
                found |= {Part.RESTORES, Part.BILLS}
    except DatabaseError:
        return frozenset(installed()) - {Part.TRIES}
    return frozenset(found.intersection(installed()))


def counts_usage(server: Server) -> bool:
    """Return whether usage is counted: a rule applies, or a batch waits in Redis.

    Each request that has a rule is counted, also if no rule bills. Raise the errors of the database and of redis-py.
    """
    return Rule.objects.using(conf.DATABASE).exclude(mode=Rule.Mode.OFF).exists() or batches_wait(server)


def batches_wait(server: Server) -> bool:
    """Return whether a batch waits in Redis. Raise the errors of redis-py."""
    keyspace = server.keyspace
    for client, shards in server.wire.servers(keyspace, range(keyspace.shards)):
        with client.pipeline(transaction=False) as pipeline:
            for shard in shards:
                pipeline.exists(keyspace.open(shard), keyspace.sealed(shard))
            if any(pipeline.execute()):
                return True
    return False


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One thing that is wrong with a server.

    name   an identifier, such as "command:HSET" or "evicts"
    parts  the parts that do not work because of it. If it is empty, everything works, but people should know it
    why    a sentence that says what is wrong
    mend   what to do: an ACL line, or a setting
    acl    the words for `ACL SETUSER <user>` that would change it; "" if no right would
    """

    name: str
    parts: frozenset[Part]
    why: str
    mend: str
    acl: str = ""

    @property
    def endangers(self) -> bool:
        """Return whether the parts work now, but can lose what they have written."""
        return self.name in ("evicts", "replay")


def merged(findings: Iterable[ServerFinding]) -> Iterator[ServerFinding]:
    """Yield findings of the same name as one, with the parts of all of them."""
    by_name: dict[str, ServerFinding] = {}
    for found in findings:
        first = by_name.get(found.name)
        by_name[found.name] = found if first is None else replace(first, parts=first.parts | found.parts)
    yield from by_name.values()


@dataclass(frozen=True, slots=True)
class Who:
    """The user as whom the app connects, and the pattern of the Redis keys that the user needs."""

    user: str
    keys: str

    def right(self, acl: str) -> str:
        """Return the command that gives the user a right."""
        return f"ACL SETUSER {self.user} {acl}"


def who_asks(server: Server, client: Any) -> tuple[Who, Who]:
    """Return the user of the app, with the pattern of the project's Redis keys, and with that of simulations."""
    user = _user(client)
    return Who(user, f"~rl:{SCHEMA}:{server.keyspace.namespace}:*"), Who(user, f"~rl:{SCHEMA}:simulate-*")


def _user(client: Any) -> str:
    """Return the name of the user as whom a client connects. If a credential provider does not say it: "<user>"."""
    options = client.connection_pool.connection_kwargs
    provider = options.get("credential_provider")
    if provider is None:
        return str(options.get("username") or "default")
    try:
        said = client.execute_command("ACL WHOAMI")
        return said.decode() if isinstance(said, bytes) else str(said)
    except (RedisError, Unavailable, OSError):  # the user may not ask, or the server does not answer
        pass
    try:
        credentials = provider.get_credentials()
    except Exception:  # noqa: BLE001  (the provider is code of the project, and its failure is reported by the connection)
        return "<user>"
    # A password alone is that of the user `default`.
    return str(credentials[0]) if len(credentials) > 1 else "default"


def of_command(error: BaseException, command: str, parts: frozenset[Part], who: Who) -> ServerFinding | None:
    """Return a finding if the server refused this command; None if the error has another meaning."""
    found = refused(error, command, who.keys)
    return of_refusal(found, parts, who) if found is not None else _of_state(error, parts)


def of_refusal(found: RefusedCommand, parts: frozenset[Part], who: Who) -> ServerFinding:
    """Return the finding for a refused command."""
    if found.reason is Reason.KEY:
        why = f"The server's user {who.user} may not touch the Redis keys {who.keys.removeprefix('~')}: {found.error}"
        return ServerFinding(f"keys:{found.acl}", parts, why, who.right(found.acl), found.acl)
    name = f"command:{found.command or '?'}"
    command = found.command or "a command of a script"
    if found.reason is Reason.MISSING:
        why = f"The server does not have {command}: {found.error}"
        mend = (
            f"Remove `rename-command {command.split(' ')[0]}` from the server's configuration. If the server is hosted,"
            f" its provider has disabled the command (docs/servers.md)."
        )
        return ServerFinding(name, parts, why, mend)
    why = f"The server's user {who.user} may not send {command}: {found.error}"
    mend = who.right(found.acl) if found.acl else "Give the user this right"
    return ServerFinding(name, parts, why, mend, found.acl)


def _of_state(error: BaseException, parts: frozenset[Part]) -> ServerFinding | None:
    """Return a finding if the server refused the command because of its state."""
    text = str(error)
    if isinstance(error, ReadOnlyError) or "READONLY" in text:
        return ServerFinding(
            "replica",
            parts,
            f"The server is a read-only replica: it refuses writes: {text}",
            "Name the primary in the LOCATION of the cache, or use Sentinel (docs/scaling.md).",
        )
    if isinstance(error, MovedError) or text.startswith("MOVED "):
        return ServerFinding(
            "cluster",
            parts,
            f"The server is a node of a Redis Cluster, but the cache does not connect to the whole cluster: {text}",
            "Connect the cache as docs/scaling.md#redis-cluster says.",
        )
    if isinstance(error, ResponseError) and memory.is_refusal(error):
        return ServerFinding(
            "full",
            parts,
            f"The memory of the server is full: {text}",
            more_memory(),
        )
    if any(word in text for word in ("NOREPLICAS", "MISCONF")):
        return ServerFinding(
            "writes", parts, f"The server refuses writes: {text}", "Look at the server's log and its disk."
        )
    return None


def of_connection(error: Exception, who: Who) -> ServerFinding:
    """Return the finding for a server to which nothing could be sent."""
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return ServerFinding(
            "login",
            frozenset(installed()),
            f"The server does not accept the user {who.user} with this password: {error}",
            "Write the user and the password into the LOCATION of the cache: redis://user:password@host:port/0.",
        )
    if isinstance(error, NoPermissionError):
        found = refused(error)
        if found is not None:
            return of_refusal(found, frozenset(installed()), who)
    if isinstance(error, ResponseError):
        return ServerFinding(
            "answer",
            frozenset(installed()),
            f"The server answers a command that each part of the app sends with an error: {error}",
            "Look at this message, and at the page of the server's kind in docs/servers.md.",
        )
    return ServerFinding(
        "connection",
        frozenset(installed()),
        f"The server does not answer: {type(error).__name__}: {error}",
        _mend_of_connection(str(error)),
    )


def _mend_of_connection(said: str) -> str:
    mend = "Look at the LOCATION of the cache, at the network, and at RATELIMITS['TIMEOUT']."
    if "CERTIFICATE_VERIFY_FAILED" in said or "certificate verify failed" in said:
        return (
            "Name the file with the certificate of the server's authority (CA) in the LOCATION of the cache:"
            " rediss://host:port/0?ssl_ca_certs=/path/ca.pem."
        )
    if "reset by peer" in said or "closed by server" in said:
        return f"If the port expects TLS, begin the LOCATION of the cache with rediss://, not redis://. {mend}"
    return mend
