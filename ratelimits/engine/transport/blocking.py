"""Wait until a list on the server has an element: a call that waits longer than the timeout of a call."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from redis.exceptions import RedisError

from ratelimits.engine.resp import resp
from ratelimits.engine.transport.connection import NotSent
from ratelimits.engine.transport.pools import async_pool

#: Maximum seconds of one blocking command. A longer wait is split into several commands.
LONGEST_BLOCK = 30.0
#: Seconds to wait for a late reply: perhaps it has arrived, but a busy loop has not read it yet.
_LAST_LOOK = 0.001


def block_seconds(seconds_left: float) -> float:
    """Return the timeout of a blocking command in seconds.

    With 0, each server would block for ever, and with 0.001, Redis 6.2 does.
    """
    return round(min(max(seconds_left, 0.002), LONGEST_BLOCK), 3)


def pop(pool: Any, key: str, seconds: float, timeout: float) -> bytes | None:
    """Wait until the list at this Redis key has an element, and remove and return its first element.

    The server gives the elements to the waiting callers in the order in which the callers came. Return None if this
    caller got no element within `seconds`. Raise NotSent if the server does not answer: its reply may be late by at
    most `timeout` seconds.
    """
    end = time.monotonic() + seconds
    try:
        connection = pool.get_connection()
        try:
            while (seconds_left := end - time.monotonic()) > 0:
                block = block_seconds(seconds_left)
                connection.send_packed_command([_blpop(key, block)], check_health=False)
                if not connection.can_read(block + timeout):
                    raise _late(block + timeout)
                if (taken := connection.read_response()) is not None:
                    return bytes(taken[1])  # BLPOP returns the key and the element
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
    except (RedisError, OSError) as error:
        raise NotSent(str(error)) from error
    return None


async def apop(pool: Any, key: str, seconds: float, timeout: float) -> bytes | None:
    """Do the same as `pop`, in async code, on a new connection that only this call uses."""
    own_pool = async_pool(pool)
    connection = own_pool.make_connection()
    end = time.monotonic() + seconds
    try:
        await connection.connect()
        while (seconds_left := end - time.monotonic()) > 0:
            block = block_seconds(seconds_left)
            await connection.send_packed_command([_blpop(key, block)], check_health=False)
            if (taken := await _read(connection, block + timeout)) is not None:
                return bytes(taken[1])
    except (RedisError, OSError) as error:
        raise NotSent(str(error)) from error
    finally:
        await connection.disconnect(nowait=True)
        await own_pool.disconnect()
    return None


async def _read(connection: Any, seconds: float) -> Any:
    """Return the next reply. Raise NotSent if there is none within `seconds`, unless the event loop was late."""
    # redis-py returns None after the timeout of a single read, so this timeout never ends.
    reading = asyncio.ensure_future(connection.read_response(timeout=2 * seconds))
    try:
        for wait in (seconds, _LAST_LOOK):
            done, _ = await asyncio.wait([reading], timeout=wait)
            if done:
                return reading.result()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    raise _late(seconds)


def _late(seconds: float) -> NotSent:
    return NotSent(f"no reply within {seconds:g} s")


def _blpop(key: str, seconds: float) -> bytes:
    return resp(b"BLPOP", key.encode(), b"%.3f" % seconds)
