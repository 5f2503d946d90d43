"""Diagnose the project's servers: what works on them, what does not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ratelimits.doctor import walks
from ratelimits.doctor.commands import USED, key_patterns
from ratelimits.doctor.errors import Who, of_command, of_connection
from ratelimits.doctor.findings import ServerFinding, merged
from ratelimits.doctor.parts import Part
from ratelimits.doctor.properties import Properties, properties, unsuitable
from ratelimits.doctor.scratch import Scratch, scratch
from ratelimits.doctor.tries import refusals
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.connection import Unavailable

#: How often the doctor tries again if the server does not answer in time, for example because it is busy.
_ATTEMPTS = 3
#: The names of findings that may be different at another time.
_PASSING = {"connection", "lost"}
#: With one of these, each command fails for the same reason: no other command is tried.
_HOPELESS = {"replica", "cluster", "connection", "login"}
#: Commands that a part may do without. Only a walk shows whether it can.
_REPLACEABLE = {f"command:{used.name}" for used in USED if used.replaceable}


@dataclass(frozen=True, slots=True)
class ServerDiagnosis:
    """What works on one server.

    address     host and port, or the path of the socket
    user        the user as whom the app connects
    properties  what the server says of itself; None if it does not say it
    findings    what is wrong
    """

    address: str
    user: str
    properties: Properties | None
    findings: tuple[ServerFinding, ...]

    def works(self, part: Part) -> bool:
        """Return whether a part of the app works on this server."""
        return not any(part in found.parts for found in self.findings)

    @property
    def acl_line(self) -> str:
        """Return the line that gives the user all missing rights; "" if none is missing."""
        missing = [found.acl for found in self.findings if found.acl]
        return f"ACL SETUSER {self.user} {' '.join(missing)}" if missing else ""


def diagnose(server: Server | None = None, *, whole: bool = True) -> list[ServerDiagnosis]:
    """Return a diagnosis for each server: one, or each primary node of a cluster.

    With `whole=False`, try the commands, but do not walk the whole way of each part. Nothing is left on the server.
    Raise NotReached if no node of a cluster answers.
    """
    server = server or current_server()
    shards = range(server.keyspace.shards)
    return [
        _diagnose_server(server, client, shards_of_server[0], whole)
        for client, shards_of_server in server.wire.servers(server.keyspace, shards)
    ]


def _diagnose_server(server: Server, client: Any, shard: int, whole: bool) -> ServerDiagnosis:
    for _ in range(_ATTEMPTS):
        diagnosis = _try_server(server, client, shard, whole)
        if not any(found.name in _PASSING for found in diagnosis.findings):
            break
    return diagnosis


def _try_server(server: Server, client: Any, shard: int, whole: bool) -> ServerDiagnosis:
    options: dict[str, Any] = client.connection_pool.connection_kwargs
    project, simulations = key_patterns(server.keyspace.namespace)
    who = Who(str(options.get("username") or "default"), project)
    address = options.get("path") or f"{options.get('host', '?')}:{options.get('port', '?')}"
    in_cluster = isinstance(server.wire, ClusterWire)
    found: list[ServerFinding] = []
    said: Properties | None = None
    try:
        said = properties(client.info())
        found += unsuitable(said, in_cluster=in_cluster)
    except NoPermissionError:
        pass  # the tries report it
    except ResponseError as error:
        if of_command(error, "INFO", frozenset(), who) is None:
            found.append(of_connection(error, who))
    except (RedisError, Unavailable, OSError) as error:
        found.append(of_connection(error, who))
    if not any(one.name in _HOPELESS for one in found):
        found = _tried(scratch(server, shard), found, who, replace(who, keys=simulations), in_cluster, whole)
    return ServerDiagnosis(str(address), who.user, said, tuple(merged(found)))


def _tried(
    place: Scratch, found: list[ServerFinding], who: Who, simulating: Who, in_cluster: bool, whole: bool
) -> list[ServerFinding]:
    """Return all findings, with those of the tries. Delete the doctor's keys in any case."""
    try:
        try:
            found = [*found, *refusals(place, who, cluster=in_cluster)]
        except (RedisError, Unavailable, OSError) as error:
            return [*found, of_connection(error, who)]
        if not whole:
            return [replace(one, parts=frozenset()) if one.name in _REPLACEABLE else one for one in found]
        return list(merged(_walked(place, found, who, simulating)))
    finally:
        place.clean()


def _walked(place: Scratch, found: list[ServerFinding], who: Who, simulating: Who) -> Iterator[ServerFinding]:
    """Walk the way of each part of which nobody knows yet whether it works. Yield the findings, with the new ones.

    Only a walk shows whether a part can do without a replaceable command.
    """
    perhaps = [one for one in found if one.name in _REPLACEABLE]
    failing = {part for one in found if one not in perhaps for part in one.parts}
    works = set()
    for part in Part:
        if part is Part.BILLS and Part.COUNTS in failing:
            # Without counts there is nothing to bill.
            yield from (replace(one, parts=frozenset({Part.BILLS})) for one in found if Part.COUNTS in one.parts)
            failing.add(part)
        if part in failing:
            continue
        error = walks.walk(place, part)
        if error is None:
            works.add(part)
            continue
        failing.add(part)
        if not any(part in one.parts for one in perhaps):
            yield _of_walk(error, part, simulating if part is Part.TRIES else who)
    yield from (replace(one, parts=one.parts - works) if one in perhaps else one for one in found)


def _of_walk(error: Exception, part: Part, who: Who) -> ServerFinding:
    cause: BaseException | None = error
    while cause is not None:
        # An error of the app has the server's error as its cause.
        if (found := of_command(cause, "", frozenset({part}), who)) is not None:
            return found
        cause = cause.__cause__
    return ServerFinding(
        "lost" if isinstance(error, (Unavailable, RedisConnectionError, RedisTimeoutError)) else f"fails:{part}",
        frozenset({part}),
        f"The app could not {part.meaning}: {str(error) or type(error).__name__}",
        "Look at this message, and at the page of the server's kind in docs/servers.md.",
    )
