"""Ask the Redis servers how much memory they use, in the background.

A process does not ask all the time. It begins when it has seen many new addresses, or when a server has refused a
command because it is full. Then it asks every second, until there is enough memory again.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from redis.exceptions import RedisError, ResponseError

from ratelimits.background import Background
from ratelimits.conf import conf
from ratelimits.engine import memory
from ratelimits.engine.memory import Shortage, Use
from ratelimits.engine.server import current_server
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.logs import bounded

logger = bounded(__name__)

#: After this number of new addresses, a process asks how much memory is used.
ADDRESSES = 100
#: Minimum seconds between two times that a process asks because of new addresses, and seconds between two times that it
#: asks while memory is short.
PAUSE = 1.0
#: Seconds between two times that a process asks although nothing happens.
_IDLE = 3600.0
#: For how many seconds full servers that do not say how much memory they use may still use the reserve.
PATIENCE = 10.0

#: How many new addresses this process has seen since it asked. Threads can add to it at the same time: it need not be
#: exact.
_new_addresses = 0
#: The moment from which new addresses let the process ask again, in seconds of the monotonic clock.
_not_before = 0.0
#: Since when no server has said how full it is, although memory is full. None: the last answer was not late.
_silent_since: float | None = None


def address_seen() -> None:
    """Note that this process has seen a new address."""
    global _new_addresses, _not_before
    _new_addresses += 1
    if _new_addresses >= ADDRESSES and time.monotonic() >= _not_before and conf.ENABLED:
        _new_addresses, _not_before = 0, time.monotonic() + PAUSE
        _wake()


def _refused(may_use_reserve: bool) -> None:
    """Log that a server has refused a command because it is full, and ask the servers from now on."""
    logger.error(
        "The memory of Redis is full. %s If usage waits there, run ratelimits_seal and ratelimits_drain; if not, raise"
        " `maxmemory`.",
        "Clients that Redis knows are decided as before, and new addresses share one count."
        if may_use_reserve
        else "Nothing is decided that needs memory: the failure policies decide.",
    )
    _wake()


memory.on_refusal = _refused


def look() -> None:
    """Ask all servers, and note how much memory they use. If none of them answers, note nothing.

    But a server that does not answer this question perhaps decides all the same. So it does not get the reserve for
    longer than PATIENCE: after that, it counts as a server that hides how much memory it has.
    """
    global _silent_since
    uses, answers, hidden, away = _ask()
    if not answers and not hidden:
        if memory.level < Shortage.FULL:
            return
        _silent_since = time.monotonic() if _silent_since is None else _silent_since
        if time.monotonic() - _silent_since < PATIENCE:
            return
        hidden, away = True, False
    _silent_since = None
    before = memory.level
    memory.note(uses, hidden=hidden, away=away)
    if hidden and before >= Shortage.FULL:
        logger.warning(
            "A Redis server that is full does not say how much memory it has (INFO), so MEMORY_BUDGET does nothing, and"
            " the failure policies decide what it refuses."
        )
    if Shortage.NONE < memory.level != before:
        shares = ", ".join(f"{use.share:.0%}" for use in uses)
        logger.warning("The memory of Redis is short (%s of `maxmemory`): new addresses are counted together.", shares)


class _Found(NamedTuple):
    """What the servers have answered: their uses of memory, and how many answered.

    hidden  whether a server refuses to answer
    away    whether a server did not answer
    """

    uses: list[Use]
    answers: int
    hidden: bool
    away: bool


def _ask() -> _Found:
    uses, answers, hidden, away = [], 0, False, False
    try:
        server = current_server()
        for client, _shards in server.wire.servers(server.keyspace, range(server.keyspace.shards)):
            try:
                use = memory.use_of(client.info("memory"))
            except ResponseError as error:  # the user may not send INFO, or the server does not have it
                hidden = True
                logger.debug("A server does not say how much memory it uses: %s", error)
            except (RedisError, OSError) as error:
                away = True
                logger.debug("It is not known how much memory a server uses: %s", error)
            else:
                answers += 1
                uses += [] if use is None else [use]
    except (RedisError, Unavailable, OSError) as error:
        away = True
        logger.debug("It is not known how much memory Redis uses: %s", error)
    return _Found(uses, answers, hidden, away)


def _wake() -> None:
    _background.start()
    _background.wake()


_background = Background("ratelimits-memory", lambda: PAUSE if memory.level else _IDLE, look, last=lambda: None)
