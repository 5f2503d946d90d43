"""Diagnose the project's servers: what works on them, what does not, and why. Write it for people, and as JSON.

docs/servers.md describes the JSON.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import SentinelConnectionPool

from ratelimits.doctor import walks
from ratelimits.doctor.findings import (
    Part,
    ServerFinding,
    Who,
    installed,
    ledger,
    merged,
    of_command,
    of_connection,
    who_asks,
)
from ratelimits.doctor.properties import Properties, properties, unsuitable
from ratelimits.doctor.scratch import Scratch, scratch
from ratelimits.doctor.tries import (
    OF_FENCES,
    REPLACEABLE,
    behind_address,
    keys_would_stay,
    refusals,
    refused_keys,
    thrown_away,
)
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.server import Server, current_server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.refused import refused

#: How often the doctor tries again if the server does not answer in time, for example because it is busy.
_ATTEMPTS = 3
#: The names of findings that may be different at another time.
_PASSING = {"connection", "lost"}
#: With one of these, each command fails for the same reason: no other command is tried.
_HOPELESS = {"replica", "several", "cluster", "connection", "login"}
#: What does harm only later: now all parts work, and a walk can find more.
_LATER = {"evicts", "replay"}
#: The version of the JSON. It becomes higher if a field is removed or gets another meaning.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ServerDiagnosis:
    """What works on one server.

    address     host and port, or the path of the socket
    user        the user as whom the app connects
    properties  what the server says of itself; None if it does not answer
    findings    what is wrong
    """

    address: str
    user: str
    properties: Properties | None
    findings: tuple[ServerFinding, ...]

    def works(self, part: Part) -> bool:
        """Return whether a part of the app works on this server."""
        return not any(part in found.parts for found in self.findings)

    def is_only_endangered(self, part: Part) -> bool:
        """Return whether a part works now, but can lose what it has written."""
        return all(found.endangers for found in self.findings if part in found.parts) and not self.works(part)

    @property
    def acl_line(self) -> str:
        """Return the line that gives the user all missing rights; "" if none is missing."""
        missing = dict.fromkeys(right for found in self.findings for right in found.acl.split())
        return f"ACL SETUSER {self.user} {' '.join(missing)}" if missing else ""


def diagnose(server: Server | None = None) -> list[ServerDiagnosis]:
    """Return a diagnosis for each server: one, or each primary node of a cluster. Nothing is left on the server.

    Raise NotReached if no node of a cluster answers.
    """
    server = server or current_server()
    shards = range(server.keyspace.shards)
    return [
        _diagnose_server(server, client, shards_of_server[0])
        for client, shards_of_server in server.wire.servers(server.keyspace, shards)
    ]


def _diagnose_server(server: Server, client: Any, shard: int) -> ServerDiagnosis:
    for _ in range(_ATTEMPTS):
        diagnosis = _try_server(server, client, shard)
        if not any(found.name in _PASSING for found in diagnosis.findings):
            break
    return diagnosis


def _try_server(server: Server, client: Any, shard: int) -> ServerDiagnosis:
    who, simulating = who_asks(server, client)
    in_cluster = isinstance(server.wire, ClusterWire)
    found: list[ServerFinding] = []
    said: Properties | None = None
    try:
        said = properties(_info(client))
        found += unsuitable(said, in_cluster=in_cluster)
    except (RedisError, Unavailable, OSError) as error:
        found.append(of_connection(error, who))
    if not any(one.name in _HOPELESS for one in found):
        place = scratch(server, shard, may_use_reserve=said is not None and said.may_use_reserve)
        try:
            found = list(_tried(place, found, who, simulating, in_cluster))
            if not any(one.name in _HOPELESS for one in found):
                found += thrown_away(place, who, said)
        except (RedisError, Unavailable, OSError) as error:
            found.append(of_connection(error, who))
        finally:
            place.clean()
    return ServerDiagnosis(_address(client.connection_pool), who.user, said, tuple(merged(found)))


def _address(pool: Any) -> str:
    options = pool.connection_kwargs
    if isinstance(pool, SentinelConnectionPool):
        return f"{pool.service_name} (Sentinel)"
    return str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")


def _info(client: Any) -> dict[str, Any]:
    """Return the server's INFO, or nothing if the user may not send it: the tries report this."""
    try:
        info: dict[str, Any] = client.info()
    except ResponseError as error:
        if refused(error, "INFO") is None:
            raise
        return {}
    return info


def _tried(
    place: Scratch, found: list[ServerFinding], who: Who, simulating: Who, in_cluster: bool
) -> Iterator[ServerFinding]:
    """Yield the findings, with those of the tries and the walks."""
    if stay := keys_would_stay(place, who):
        yield from (*found, *stay)
        return
    if not in_cluster and (behind := list(behind_address(place))):
        yield from (*found, *behind)
        return
    found = [*found, *refusals(place, who, cluster=in_cluster), *refused_keys(place, simulating)]
    if any(one.name in _HOPELESS for one in found):
        yield from found
        return
    found = [_with_other_fences(place, one) if one.name == "append-only" else one for one in found]
    yield from _walked(place, found, who, simulating)


def _walked(place: Scratch, found: list[ServerFinding], who: Who, simulating: Who) -> Iterator[ServerFinding]:
    """Walk the way of each part of which nobody knows yet whether it works. Yield the findings, with the new ones.

    Only a walk shows whether a part can do without a replaceable command.
    """
    known = [one for one in found if one.name not in _LATER]
    failing = {part for one in known for part in one.parts - _replaceable(one)}
    perhaps = {part for one in known for part in one.parts & _replaceable(one)}
    # Parts of which is known what to blame: nothing, or another reason, or the replaceable command in `blamed`.
    cleared = set(failing)
    blamed: dict[Part, str] = {}
    new: dict[Part, ServerFinding] = {}

    def stopped(one: ServerFinding) -> frozenset[Part]:
        innocent = {part for part in cleared & _replaceable(one) if blamed.get(part) != one.name}
        return one.parts - innocent

    for part in installed():
        if part is Part.BILLS and Part.COUNTS in failing and not _can_drain(place, new.get(Part.COUNTS)):
            # Without counts there is nothing to bill.
            found = [replace(one, parts=one.parts | _with_bills(stopped(one))) for one in found]
            new |= {part: replace(new[Part.COUNTS], parts=frozenset({part}))} if Part.COUNTS in new else {}
            blamed |= {part: blamed[Part.COUNTS]} if Part.COUNTS in blamed else {}
            failing.add(part)
            cleared.add(part)
        if part in failing:
            continue
        error = walks.walk(place, part)
        if error is None:
            cleared.add(part)
            continue
        failing.add(part)
        later = [one.acl for one in found if one.name in OF_FENCES]
        reason = ledger.of_fence(error, place, who, later) or _of_walk(
            error, part, simulating if part is Part.TRIES else who
        )
        of_part = [one for one in known if part in one.parts]
        if part not in perhaps or _names_another(reason, of_part):
            new[part] = reason
            cleared.add(part)
        elif any(one.name == reason.name for one in of_part):
            blamed[part] = reason.name
            cleared.add(part)
    is_fenced = not any(one.name == "fence" for one in new.values())
    for one in found:
        if one.name not in OF_FENCES:
            yield replace(one, parts=stopped(one))
        elif is_fenced:
            # Without counts nobody has tried the fence: its command may be a reason.
            yield _with_other_fences(place, replace(one, parts=one.parts & failing))
    yield from new.values()


def _can_drain(place: Scratch, counts: ServerFinding | None) -> bool:
    """Return whether usage that waits can be sealed and drained although nothing more is counted.

    A server whose reserve is used up refuses to count, but not to seal and to drain. `counts` is why it does not count.
    """
    full = replace(place, may_use_reserve=True)
    return counts is not None and counts.name == "full" and walks.walk(full, Part.COUNTS) is None


def _with_bills(stopped: frozenset[Part]) -> frozenset[Part]:
    return frozenset({Part.BILLS}) if Part.COUNTS in stopped else frozenset()


def _with_other_fences(place: Scratch, one: ServerFinding) -> ServerFinding:
    """Return a finding about the fence that also says which other fences the server accepts."""
    return replace(one, mend=f"{one.mend.removesuffix('.')}. {ledger.other_fences(place)}")


def _names_another(reason: ServerFinding, known: Sequence[ServerFinding]) -> bool:
    """Return whether the error of a walk names a reason that the tries did not find."""
    names_none = reason.name in {"lost", "command:?"} or reason.name.startswith("fails:")
    return not names_none and all(reason.name != one.name for one in known)


def _replaceable(found: ServerFinding) -> frozenset[Part]:
    """Return the parts that may do without what is missing."""
    return REPLACEABLE.get(found.name, frozenset())


def _of_walk(error: Exception, part: Part, who: Who) -> ServerFinding:
    cause: BaseException | None = error
    answered = False
    while cause is not None:
        # An error of the app has the server's error as its cause.
        if (found := of_command(cause, "", frozenset({part}), who)) is not None:
            return found
        answered = answered or isinstance(cause, ResponseError)
        cause = cause.__cause__
    is_lost = not answered and isinstance(error, (Unavailable, RedisConnectionError, RedisTimeoutError))
    return ServerFinding(
        "lost" if is_lost else f"fails:{part}",
        frozenset({part}),
        f"The app could not {part.meaning}: {str(error) or type(error).__name__}",
        "Look at this message, and at the page of the server's kind in docs/servers.md.",
    )


def broken(diagnoses: Sequence[ServerDiagnosis], needed: Collection[Part]) -> list[Part]:
    """Return the needed parts that do not work on each server."""
    return [part for part in installed() if part in needed and not all(one.works(part) for one in diagnoses)]


def as_json(diagnoses: Sequence[ServerDiagnosis], needed: Collection[Part], *, stuck: bool) -> dict[str, Any]:
    """Return the diagnosis as an object for JSON. `stuck`: usage is counted that will not reach the ledger."""
    return {
        "format": FORMAT,
        "ok": not broken(diagnoses, needed),
        "needed": [str(part) for part in installed() if part in needed],
        "stuck": stuck,
        "servers": [_server(one) for one in diagnoses],
    }


def _server(one: ServerDiagnosis) -> dict[str, Any]:
    return {
        "address": one.address,
        "user": one.user,
        "product": (one.properties and one.properties.product) or None,
        "version": (one.properties and one.properties.version) or None,
        "works": [str(part) for part in installed() if one.works(part)],
        "fails": [str(part) for part in installed() if not one.works(part)],
        "findings": [_finding(found) for found in one.findings],
        "acl": one.acl_line,
    }


def _finding(found: ServerFinding) -> dict[str, Any]:
    return {
        "name": found.name,
        "parts": [str(part) for part in installed() if part in found.parts],
        "why": found.why,
        "mend": found.mend,
    }


def rows(one: ServerDiagnosis, needed: Collection[Part]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each part: its name, whether it works, whether the project needs it, and what it does."""
    for part in installed():
        works = "yes" if one.works(part) else "at risk" if one.is_only_endangered(part) else "NO"
        yield part, works, "yes" if part in needed else "no", part.meaning


def heading(one: ServerDiagnosis) -> str:
    """Return the line that names a server."""
    said = "a server that tells no version"
    if one.properties and one.properties.product:
        said = f"{one.properties.product} {one.properties.version}"
    return f"{one.address}: {said}, as the user {one.user}"


def sentences(one: ServerDiagnosis) -> Iterator[str]:
    """Yield the findings as lines of text: what is wrong, which parts fail because of it, and what to do."""
    for found in one.findings:
        stopped = ", ".join(part for part in installed() if part in found.parts)
        yield f"- {found.why}"
        yield f"    {'endangers' if found.endangers else 'stops'}: {stopped or 'nothing'}"
        yield f"    to do: {found.mend}"
    if one.acl_line:
        yield f"All missing rights in one line: {one.acl_line}"
