"""Many decisions in a row on a virtual clock: what a simulation asks of the real scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ratelimits.engine.call import Call, Command, nonce, shard, states
from ratelimits.engine.decide import Decision, Stale, read
from ratelimits.engine.server import Server


def _to(command: Command, name: bytes, run: str) -> bytes:
    return command.to(run, name)


def replay(here: Server, calls: Sequence[Call]) -> list[Decision]:
    """Decide calls in order, in one round trip; each brings its own `now` and is `virtual`.

    Nothing else may decide on the same keys meanwhile. Raises Stale for a moment that its calendars do not reach to.
    """
    commands = [Command(here.keyspace, call) for call in calls]
    packed = [partial(_to, command, nonce().encode()) for command in commands]
    replies = here.wire.stream(packed, {command.script for command in commands})
    decisions = []
    for call, raw in zip(calls, replies, strict=True):
        reply = read(raw)
        if reply[0] != 1:
            raise Stale(0, reply[1])
        decisions.append(Decision(call, reply))
    return decisions


def forget(here: Server, calls: Sequence[Call]) -> None:
    """Leave nothing of these calls' keys behind."""
    keys: set[str] = set()
    for call in calls:
        own = states(here.keyspace, call, [shard(here.keyspace, key, call.account) for key in call.keys])
        keys.update(own, (key + ":n" for key in own))
    found = sorted(keys)
    for start in range(0, len(found), 1000):
        here.wire.client.unlink(*found[start : start + 1000])
