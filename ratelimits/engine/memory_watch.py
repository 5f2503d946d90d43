"""Ask the Redis servers how much memory they use, in the background.

A process does not ask all the time. It begins when it has seen many new addresses, or when a server has refused a
command because it is full. Then it asks every second, until there is enough memory again.
"""

from __future__ import annotations

import time

from redis.exceptions import RedisError

from ratelimits.background import Background
from ratelimits.engine import memory
from ratelimits.engine.memory import Shortage
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

#: How many new addresses this process has seen since it asked. Threads can add to it at the same time: it need not be
#: exact.
_new_addresses = 0
#: The moment from which new addresses let the process ask again, in seconds of the monotonic clock.
_not_before = 0.0


def address_seen() -> None:
    """Note that this process has seen a new address."""
    global _new_addresses, _not_before
    _new_addresses += 1
    if _new_addresses >= ADDRESSES and time.monotonic() >= _not_before:
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
    """Ask all servers, and note how much memory they use. If one of them does not answer, note nothing."""
    try:
        server = current_server()
        asked = server.wire.servers(server.keyspace, range(server.keyspace.shards))
        uses = [use for client, _shards in asked if (use := memory.use_of(client.info("memory"))) is not None]
    except (RedisError, Unavailable, OSError) as error:
        logger.debug("It is not known how much memory Redis uses: %s", error)
        return
    before = memory.level
    memory.note(uses)
    if Shortage.NONE < memory.level != before:
        shares = ", ".join(f"{use.share:.0%}" for use in uses)
        logger.warning("The memory of Redis is short (%s of `maxmemory`): new addresses are counted together.", shares)


def _wake() -> None:
    _background.start()
    _background.wake()


_background = Background("ratelimits-memory", lambda: PAUSE if memory.level else _IDLE, look, last=lambda: None)
