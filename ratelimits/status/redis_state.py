"""The state of Redis: read it, and say it as facts of the status page.

All servers must answer within TIMEOUT seconds. The facts say whether they answer, what they keep, and what waits there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import redis
from django.utils.translation import gettext as _
from redis.exceptions import BusyLoadingError, ResponseError

from ratelimits.conf import conf
from ratelimits.doctor.findings import ServerFinding, needed
from ratelimits.doctor.properties import Properties, eviction, properties
from ratelimits.doctor.tries import lost_at_restart, refused_commands
from ratelimits.engine import memory
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.breaker import prober
from ratelimits.engine.transport.refused import refused
from ratelimits.moments import moment
from ratelimits.status.fact import Fact, Level


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of one server."""

    #: What the server says of itself.
    said: Properties
    #: The highest version of the configuration in the server's shards; 0 if no shard has a version.
    version: int
    #: The number of open batches.
    open: int
    #: The number of sealed batches.
    sealed: int
    #: What the server refuses, as far as it was tried (see `RedisReading`).
    refuses: tuple[ServerFinding, ...] = ()
    #: That a restart throws away what was written, if it was tried.
    loses: ServerFinding | None = None


@dataclass(frozen=True, slots=True)
class RedisState:
    """The state of all servers."""

    #: The servers that answered.
    servers: tuple[ServerState, ...]
    #: The number of servers that did not answer.
    silent: int
    #: The first error; "" if all servers answered.
    error: str
    #: How long the reading took, in seconds.
    seconds: float

    @property
    def answers(self) -> bool:
        """Return whether all servers answered."""
        return not self.silent

    @property
    def loads(self) -> bool:
        """Return whether a server has started, and still loads its data."""
        return self.error.startswith(BusyLoadingError.__name__)


#: A message of a thread, and its moment (s, by `time.monotonic`). The message is the number of servers, the state of
#: one server, or an error.
_Message = tuple[int | ServerState | Exception, float]


class RedisReading:
    """Reads the state of all servers in threads. The threads begin at once, so the caller can use a database meanwhile.

    The timeout of a socket is not enough, because it limits only a single wait: for the connection, for a part of a
    reply, or for one node of a cluster. A thread that still waits ends later, after the timeouts of its socket.
    """

    def __init__(self, *, tries: bool = False) -> None:
        """Begin to read. With `tries`, also try each command that the app sends, and what a restart would lose."""
        self._started_at, self._messages = time.monotonic(), SimpleQueue[_Message]()
        _start_thread(_ask_all, self._messages, tries)

    def state(self) -> RedisState:
        """Wait for the servers, and return the states of the servers that answered within TIMEOUT seconds."""
        servers: list[ServerState] = []
        # Expect one server until the message with the number of servers arrives.
        expected, failed, error, seconds = 1, 0, "", 0.0
        while len(servers) + failed < expected:
            remaining = self._started_at + conf.TIMEOUT - time.monotonic()
            try:
                message, sent_at = self._messages.get(timeout=max(remaining, 0.0))
            except Empty:
                error, seconds = error or f"no answer within {conf.TIMEOUT:g} s", time.monotonic() - self._started_at
                break
            seconds = sent_at - self._started_at
            if isinstance(message, int):
                expected = message
            elif isinstance(message, ServerState):
                servers.append(message)
            else:
                failed, error = failed + 1, error or f"{type(message).__name__}: {message}"
        return RedisState(tuple(servers), expected - len(servers), error, seconds)


def read_redis() -> RedisState:
    """Return the state of all servers that answer within TIMEOUT."""
    return RedisReading().state()


def _start_thread(target: Any, *arguments: Any) -> None:
    Thread(target=target, args=arguments, daemon=True, name="ratelimits-status").start()


def _ask_all(messages: SimpleQueue[_Message], tries: bool) -> None:
    """Find the servers, and ask each of them in its own thread. In a cluster, one node must first list all nodes."""
    try:
        server = current_server()
        clients = list(server.wire.servers(server.keyspace, range(server.keyspace.shards)))
    except Exception as error:  # noqa: BLE001  (the page shows any error)
        _put(messages, error)
        return
    _put(messages, len(clients))
    for client, shards in clients[1:]:
        _start_thread(_ask, client, server, shards, messages, tries)
    # This thread asks the first server.
    client, shards = clients[0]
    _ask(client, server, shards, messages, tries)


def _ask(
    client: redis.Redis, server: Server, shards: Sequence[int], messages: SimpleQueue[_Message], tries: bool
) -> None:
    keyspace = server.keyspace
    try:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.info()
            for shard in shards:
                pipeline.get(keyspace.head(shard))
                pipeline.exists(keyspace.open(shard))
                pipeline.llen(keyspace.sealed(shard))
            info, *replies = pipeline.execute(raise_on_error=False)
        hidden = isinstance(info, ResponseError) and refused(info, "INFO") is not None
        for failed in (reply for reply in replies if isinstance(reply, Exception)):
            raise failed
        if isinstance(info, Exception) and not hidden:
            raise info
        said = properties({} if hidden else info)
        refuses = refused_commands(server, client, shards[0]) if tries or hidden else ()
        loses = lost_at_restart(server, client, shards[0], said) if tries else None
        _put(messages, _state(said, replies, tuple(refuses), loses))
    except Exception as error:  # noqa: BLE001  (the page shows any error)
        _put(messages, error)


def _put(messages: SimpleQueue[_Message], message: int | ServerState | Exception) -> None:
    messages.put((message, time.monotonic()))


def _state(
    said: Properties, replies: list[Any], refuses: tuple[ServerFinding, ...], loses: ServerFinding | None
) -> ServerState:
    # The replies to the three commands of each shard, in the order in which `_ask` sends them.
    heads, open_batches, sealed_batches = replies[::3], replies[1::3], replies[2::3]
    # A head begins with the version of the rules.
    versions = [int(head.split()[0]) for head in heads if head]
    return ServerState(
        said=said,
        version=max(versions, default=0),
        open=sum(open_batches),
        sealed=sum(sealed_batches),
        refuses=refuses,
        loses=loses,
    )


def redis_facts(redis: RedisState, has_billing_rule: bool) -> Iterator[Fact]:
    """Yield the facts about the servers: whether they answer, their memory, and whether they drop what they have."""
    refuses = [one for server in redis.servers for one in server.refuses]
    if redis.answers and refuses:
        commands = sorted({one.name.partition(":")[2] for one in refuses})
        word = _("answers, but refuses %(command)s") % {"command": ", ".join(commands)}
        level = Level.RED if any(one.parts & needed() for one in refuses) else Level.AMBER
        yield Fact("redis", _("Redis"), level, word, " ".join(map(sentences, refuses)))
    elif redis.answers:
        word = _("answers in %(ms)s ms") % {"ms": f"{redis.seconds * 1000:.1f}"}
        yield Fact("redis", _("Redis"), Level.GREEN, word)
    else:
        count = {"silent": redis.silent, "all": redis.silent + len(redis.servers)}
        is_single = count["all"] == 1
        word = _("does not answer") if is_single else _("%(silent)s of %(all)s servers do not answer") % count
        if redis.loads:
            word = _("recovering: it loads its data")
        yield Fact("redis", _("Redis"), Level.RED, word, redis.error)
    yield _memory(redis)
    yield _eviction(redis, has_billing_rule)


def sentences(found: ServerFinding) -> str:
    """Return what a server refuses or loses, and what to do."""
    return f"{found.why.removesuffix('.')}. {found.mend.removesuffix('.')}."


def hidden(name: str, title: str) -> Fact:
    """Return a fact that the app may not read."""
    hint = _("The server does not tell it. `manage.py check --database default` says which right is missing.")
    return Fact(name, title, Level.UNKNOWN, _("cannot be read"), hint)


def unknown(name: str, title: str) -> Fact:
    """Return a fact that nobody knows while Redis does not answer."""
    return Fact(name, title, Level.UNKNOWN, _("unknown"), _("Redis does not answer."))


def _memory(redis: RedisState) -> Fact:
    title = _("Memory")
    if not redis.servers:
        return unknown("memory", title)
    memories = [
        (server.said.memory, server.said.max_memory) for server in redis.servers if server.said.memory is not None
    ]
    if not memories:
        return hidden("memory", title)
    # A server without a maximum counts as nearly empty: a maximum of 2**63 bytes replaces its 0.
    used_bytes, max_memory = max(memories, key=lambda each: (each[0] / (each[1] or 2**63), each[0]))
    used = f"{used_bytes / 2**20:,.1f} MiB"
    if not max_memory:
        return Fact("memory", title, Level.GREEN, _("%(used)s, no maximum") % {"used": used})
    share = used_bytes / max_memory
    starts, level, hint = memory.starts(), Level.GREEN, ""
    if share >= starts[memory.Shortage.SHORT]:
        level = Level.RED
        hint = _("All new addresses share one count. Drain the usage that waits, or raise maxmemory.")
    elif share >= starts[memory.Shortage.NEAR]:
        level = Level.AMBER
        hint = _("New addresses of a network share one count. Drain the usage that waits, or raise maxmemory.")
    maximum = f"{max_memory / 2**20:,.1f} MiB"
    word = _("%(used)s of %(most)s (%(percent)s %%)") % {"used": used, "most": maximum, "percent": f"{share * 100:.0f}"}
    return Fact("memory", title, level, word, hint)


def _eviction(redis: RedisState, has_billing_rule: bool) -> Fact:
    title = _("Eviction policy")
    if not redis.servers:
        return unknown("eviction", title)
    found = {one.name for server in redis.servers for one in eviction(server.said)}
    if "evicts" in found:
        policies = sorted({server.said.policy for server in redis.servers if server.said.policy is not None})
        hint = _(
            "The server can drop limits, and usage that is not in the ledger yet. Set maxmemory-policy noeviction."
        )
        level = Level.RED if has_billing_rule else Level.AMBER
        return Fact("eviction", title, level, ", ".join(policies), hint)
    return hidden("eviction", title) if found else Fact("eviction", title, Level.GREEN, "noeviction")


def failure_policy(redis: RedisState, rule_counts: Mapping[str, int], recent: tuple[int, int | None]) -> Fact:
    """Return the fact about the failure policies. `rule_counts` has the number of rules of each policy.

    The policy "" means that a rule has no policy of its own. `recent` is a moment (s since 1970 UTC), and how many
    requests failure policies have decided since: a server can answer this page and yet refuse decisions, for example
    because its memory is full. None stands for a number that nobody counts.
    """
    title, default = _("Failure policy"), conf.FAILURE_POLICY
    policies = ", ".join(f"{policy}: {count}" for policy, count in sorted(rule_counts.items()) if policy)
    detail = _("Rules with a policy of their own: %(own)s.") % {"own": policies} if policies else ""
    if redis.answers and prober.is_active():
        hint = _("Redis answers again. This process asks it within a second; until then, the failure policy decides.")
        return Fact("failure", title, Level.AMBER, _("recovering"), hint, "rule")
    since, requests = recent
    if redis.answers and requests:
        word = _("decided %(count)s requests (%(policy)s)") % {"count": f"{requests:,}", "policy": default}
        hint = _(
            "Redis answers now. But since %(time)s UTC these requests got no decision. If their number grows, run"
            " ratelimits_doctor: it says what the server refuses."
        ) % {"time": f"{moment(since * 1_000_000):%H:%M}"}
        return Fact("failure", title, Level.AMBER, word, f"{hint} {detail}".strip(), "rule")
    if redis.answers and requests is None:
        word = _("not active in this process (%(policy)s)") % {"policy": default}
        return Fact("failure", title, Level.GREEN, word, detail, "rule")
    if redis.answers:
        return Fact("failure", title, Level.GREEN, _("not active (%(policy)s)") % {"policy": default}, detail, "rule")
    return Fact("failure", title, Level.RED, _("active: %(policy)s") % {"policy": default}, detail, "rule")
