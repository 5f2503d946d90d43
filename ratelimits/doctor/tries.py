"""Try each command that the app sends, by itself and in a script, as the app's own user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.doctor.commands import KEYS, STRING, USED, Used
from ratelimits.doctor.errors import Who, of_command, of_refusal, who_asks
from ratelimits.doctor.findings import ServerFinding, merged
from ratelimits.doctor.parts import Part
from ratelimits.doctor.scratch import TIME_TO_LIVE, Scratch, name_of, scratch
from ratelimits.engine import memory
from ratelimits.engine.cluster.wire import ClusterWire
from ratelimits.engine.server import Server
from ratelimits.engine.transport.refused import Reason, refused
from ratelimits.usage.fence import another_fence

#: Sends one command from a script. The keys come first in ARGV too, where the command needs them.
_SENDS = "return redis.call(unpack(ARGV))"
#: What the server does for the doctor itself: a refusal of these commands is reported by their own tries.
_EXPIRES, _DELETES = "PEXPIRE", "UNLINK"


#: Commands that parts may do without, with these parts. Only a walk shows whether they can.
REPLACEABLE = {f"command:{used.name}": frozenset(used.replaceable) for used in USED if used.replaceable}
#: Commands that only a fence needs. The finding about the fence says everything about them.
OF_FENCES = {f"command:{used.name}" for used in USED if used.fence}


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
        for finding in [of_refusal(found, frozenset(Part), who)]
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
            mend=f"{one.mend.removesuffix('.')}. {another_fence()}" if one.name in OF_FENCES else one.mend,
        )
        for one in found
    ]


def refusals(scratch: Scratch, who: Who, *, cluster: bool) -> list[ServerFinding]:
    """Return a finding for each command that the server refuses, with the parts that need it."""
    alone = [used for used in USED if used.alone and (cluster or not used.cluster) and used.fence in ("", conf.FENCE)]
    found = list(_found(_sent(scratch, alone, _by_itself), lambda used: used.alone, who))
    # Without EVAL no script can be tried. But a right for a command is the same in a script and by itself.
    written = _by_itself if any(one.name == "command:EVAL" for one in found) else _in_script
    in_scripts = [used for used in USED if used.in_scripts]
    found += _found(_sent(scratch, in_scripts, written), lambda used: used.in_scripts, who)
    return list(merged(found))


def _found(replies: Iterable[tuple[Used, Any]], parts_of: Any, who: Who) -> Iterator[ServerFinding]:
    for used, reply in replies:
        if not isinstance(reply, ResponseError):
            continue
        if memory.is_refusal(reply):
            continue  # the app's scripts write in another way when the memory is full: only the walks show what works
        parts: frozenset[Part] = frozenset(parts_of(used))
        # Any other error comes from an earlier refusal: for example, LSET finds no list if RPUSH was refused.
        if (finding := of_command(reply, used.name, parts, who)) is not None:
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
