"""How short the memory of the Redis servers is, and what this process does to save memory.

A server that has reached its `maxmemory` refuses commands that need memory. It is full, but it is not away: it can
still decide. So a process saves memory before a server is full, and lets a full server decide all the same (see
`Shortage`).

This module does no I/O. engine/memory_watch.py asks the servers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from redis.exceptions import OutOfMemoryError, ResponseError

from ratelimits.conf import conf

#: What the scripts may use above `maxmemory`: this share of it, but at least this number of bytes. It is for the states
#: and the usage of known clients, until usage is drained or somebody adds memory. (The buffers of clients take some of
#: it.)
RESERVE, LEAST_RESERVE = 0.05, 4 * 2**20
#: The level falls only when the share is this much below the start of the level.
_HYSTERESIS = 0.02
#: The error of a script that a server has refused. (Redis 6.2 has the error of the command in its text.)
_OUT_OF_MEMORY = re.compile(r"^OOM |-OOM ")


class Shortage(IntEnum):
    """How short the memory of the fullest server is.

    NONE     there is enough
    NEAR     the share MEMORY_BUDGET of `maxmemory` is used: a new address shares the count of its network
    SHORT    half of the rest is used too: all new addresses of networks without a count share one count
    FULL     a server has refused a command. From now on, the scripts use the reserve. Anonymous callers with a new key
             of a view share a count too
    BEYOND   the reserve is used too, or it is not known how much memory there is: a full server refuses, and the
             failure policies decide
    """

    NONE = 0
    NEAR = 1
    SHORT = 2
    FULL = 3
    BEYOND = 4


#: The level, as this process knows it.
level = Shortage.NONE
#: Whether a server hides how much memory it has, or no server has a maximum. None: nobody has asked them yet.
_is_unknown: bool | None = None
#: Functions that are called after the level has changed.
on_change: list[Callable[[], object]] = []
#: A function that is called after each refusal, with whether the scripts may use the reserve.
on_refusal: Callable[[bool], object] | None = None


def starts() -> dict[Shortage, float]:
    """Return the share of `maxmemory` from which each level begins. NONE begins at 0, and BEYOND after the reserve."""
    budget = conf.MEMORY_BUDGET
    return {Shortage.NEAR: budget, Shortage.SHORT: (1 + budget) / 2, Shortage.FULL: 1.0}


class Use(NamedTuple):
    """How many bytes a server uses, and how many it may use at most (`maxmemory`)."""

    used: int
    most: int

    @property
    def share(self) -> float:
        return self.used / self.most

    @property
    def level(self) -> Shortage:
        """Return the level of this server. A level ends only a little below the share at which it begins."""
        if self.used > self.most + max(RESERVE * self.most, LEAST_RESERVE):
            return Shortage.BEYOND
        reached = Shortage.NONE
        for next_level, start in starts().items():
            if self.share >= start - (_HYSTERESIS if next_level <= level else 0):
                reached = next_level
        return reached


def coarser() -> int:
    """Return how many of the two keys that new addresses can share are in use: none, that of the network, or both."""
    return min(level, Shortage.SHORT)


def use_of(info: Mapping[str, Any]) -> Use | None:
    """Return how much memory a server uses, by its INFO. Return None if it names no maximum."""
    most = int(info.get("maxmemory", 0))
    if not most or "used_memory" not in info:
        return None
    # A server does not count the buffers of its replicas and of its append-only file.
    return Use(int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0)), most)


def note(uses: Sequence[Use], *, hidden: bool = False, away: bool = False) -> None:
    """Note how much memory the servers use that name a maximum.

    hidden  whether another server does not say how much memory it has. Then no server gets the reserve, because nobody
            would notice that it is used up
    away    whether another server does not answer. Then the level stays as it was if it was higher, but below FULL
    """
    global _is_unknown
    _is_unknown = hidden or not uses
    reached = max((use.level for use in uses), default=Shortage.NONE)
    if away:
        reached = max(reached, min(level, Shortage.SHORT))
    _set(Shortage.BEYOND if hidden and reached is Shortage.FULL else reached)


def note_refusal() -> bool:
    """Note that a server has refused a command because it is full. Return whether the scripts may use the reserve."""
    if level < Shortage.FULL:
        _set(Shortage.BEYOND if _is_unknown else Shortage.FULL)
    may_use_reserve = level is Shortage.FULL
    if on_refusal is not None:
        on_refusal(may_use_reserve)
    return may_use_reserve


def is_refusal(error: ResponseError) -> bool:
    """Return whether the error means that the server has done nothing because its memory is full."""
    return isinstance(error, OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def forget() -> None:
    """Forget what is known about the servers."""
    global _is_unknown
    _is_unknown = None
    _set(Shortage.NONE)


def _set(new: Shortage) -> None:
    global level
    if new is not level:
        level = new
        for function in on_change:
            function()
