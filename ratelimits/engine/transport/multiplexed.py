"""One connection of an event loop to a server, which all its tasks share.

Where nothing is under way, a command is written at once. What else the tasks ask in one turn of the loop is written in
one go. Replies are matched first in, first out. At most IN_FLIGHT commands are written and unanswered at a time. The
others wait in order, as long as it takes: waiting for one's own turn is no failure of the server. TIMEOUT runs from the
write.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from contextvars import Context
from typing import Any

import hiredis
from redis.asyncio.connection import DefaultParser
from redis.exceptions import InvalidResponse, NoScriptError, RedisError, ResponseError

from ratelimits.engine.resp import Sendable, loading
from ratelimits.engine.scripts import Script
from ratelimits.engine.transport.connection import INFO, MORE, NotSent, Unanswered, failure, refuses_writes, run_of

#: Commands of one connection that are written and unanswered at most. A server decides so many in some 10 ms.
IN_FLIGHT = 128
#: A loop that was late by this part of TIMEOUT while it connected did not give the server its time. It tries again:
#: so many attempts in all.
LATE, ATTEMPTS = 0.2, 5
#: Seconds in which a late loop reads what has come, before the oldest reply is given up.
_LAST_LOOK = 0.001


class _Reply(asyncio.Future[Any]):
    """A reply to come. Its caller can be cancelled until the command is written, and after that once it is there.

    What was written may take place: somebody must hear of it, so that it can be given back.
    """

    written = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it, unless its command was written."""
        return not self.written and super().cancel(msg)


class _Loading:
    """SCRIPT LOAD, as a command."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def to(self, run: str, name: bytes) -> bytes:
        return loading(self.script)


class _Link(asyncio.Protocol):
    """A connection that is up. What is written on it is answered in order, or all of it is Unanswered."""

    def __init__(self, connection: Any, run: str, timeout: float, owner: Multiplexed) -> None:
        self.run = run
        #: Whether nothing more is to be written on it.
        self.ended = False
        self._connection = connection
        self._timeout = timeout
        # The loop keeps a connection that is open, and what that holds: a way that nobody uses any longer must go.
        self._owner = weakref.ref(owner)
        self._loop = asyncio.get_running_loop()
        self._sent: deque[tuple[_Reply, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._heard = False
        #: Done once the socket is closed.
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=MORE
        )
        # redis-py has made the connection; from here on its bytes come here.
        self._transport: Any = connection._writer.transport
        self._before = self._transport.get_protocol()
        self._transport.set_protocol(self)

    @property
    def idle(self) -> bool:
        """Whether it can be written on, and nothing that was written is unanswered."""
        return not self._sent and not self.ended

    def write(self, waiting: deque[tuple[Sendable, bytes, _Reply]]) -> None:
        """Write what waits, in order and in one go, as far as there is room."""
        packed = []
        room, now = IN_FLIGHT - len(self._sent), self._loop.time()
        while waiting and room:
            command, name, future = waiting.popleft()
            if future.done():
                continue  # its caller was cancelled: it is not sent
            try:
                packed.append(command.to(self.run, name))
            except Exception as error:  # noqa: BLE001  (its caller's own)
                future.set_exception(error)
                continue
            future.written = True
            self._sent.append((future, now))
            room -= 1
        if packed:
            self._transport.write(b"".join(packed))
            if self._timer is None:
                self._look_at(now + self._timeout)

    def data_received(self, data: bytes) -> None:
        """Hand each reply to whoever is next."""
        self._heard = True
        reader, sent = self._reader, self._sent
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not MORE:
                future, _at = sent.popleft()
                if isinstance(reply, Exception):
                    reply = self._refused(reply)
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (RedisError, IndexError) as error:
            self.fail(f"the server said what nobody asked for: {error}")
            return
        if self.ended and not sent:
            self.close()
        if (owner := self._owner()) is not None:
            owner.write()

    def _refused(self, error: Exception) -> Exception:
        """What an error is for its caller. A server that takes no writes is left once all it was sent is answered."""
        if isinstance(error, ResponseError) and not refuses_writes(error):
            return error
        self.ended = True
        return NotSent(str(error)) if isinstance(error, ResponseError) else failure(error)

    def _look_at(self, moment: float) -> None:
        self._heard = True
        self._timer = self._loop.call_at(moment, self._look)

    def _look(self) -> None:
        """See whether the oldest reply is overdue. One timer serves all, since the oldest is due first."""
        self._timer = None
        if not self._sent:
            return
        due, now = self._sent[0][1] + self._timeout, self._loop.time()
        if now < due:
            self._look_at(due)
        elif self._heard:
            # Where the loop was busy, replies may be here that nobody has read yet: that is not the server's fault.
            self._look_at(now + _LAST_LOOK)
            self._heard = False
        else:
            self.fail(f"no reply within {self._timeout:g} s")

    def connection_lost(self, error: Exception | None) -> None:
        """Tell all whose reply will not come."""
        self._before.connection_lost(None)
        self.gone.set_result(None)
        self.fail(f"the server closed the connection{f': {error}' if error else ''}")

    def fail(self, message: str) -> None:
        """End the connection: what was written is Unanswered."""
        self.close()
        event = object()
        while self._sent:
            future, _at = self._sent.popleft()
            if not future.done():
                future.set_exception(Unanswered(message, event))
        if (owner := self._owner()) is not None:
            owner.lost(self, message, event)

    def close(self) -> None:
        """Close the connection, without a word to anybody."""
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection._writer is not None:
            self._transport.abort()
            self._connection._close()


class Multiplexed:
    """The way of one event loop to a server; `pool` makes its connections, redis.asyncio's.

    The connection is made by the first who asks, for all who ask meanwhile, and made anew by the next who asks after it
    was lost.
    """

    def __init__(self, pool: Any, timeout: float, process: object) -> None:
        self.process = process
        self._pool = pool
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Sendable, bytes, _Reply]] = deque()
        self._loading: dict[bytes, _Reply] = {}
        self._turn = False

    async def exchange(self, command: Sendable, name: bytes) -> Any:
        """Return the reply to a command. Raise NotSent, Unanswered, or what the server refuses with.

        A script that the server does not know is loaded, once for all who miss it, and the command sent again. A caller
        that is cancelled once the command is written gets the reply all the same: Task.cancelling tells it of that.
        """
        try:
            return await self._reply(command, name)
        except NoScriptError:
            await self._load(command.script)
            return await self._reply(command, name)

    async def _reply(self, command: Sendable, name: bytes) -> Any:
        reply = self._queue(command, name)
        try:
            return await reply
        except asyncio.CancelledError:
            if reply.cancelled():
                raise
            return reply.result()

    def _queue(self, command: Sendable, name: bytes) -> _Reply:
        future = _Reply(loop=self._loop)
        self._waiting.append((command, name, future))
        if self._turn:
            return future
        if self._link is not None and self._link.idle:
            self.write()  # alone: it need not wait for others
        else:
            self._turn = True
            self._loop.call_soon(self._turned)
        return future

    def _turned(self) -> None:
        self._turn = False
        self.write()

    def write(self) -> None:
        """Write what waits, as far as there is room; connect first if need be."""
        if not self._waiting:
            return
        if self._link is not None and self._link.ended:
            self._link = None  # what waits has another connection to wait for
        if self._link is not None:
            self._link.write(self._waiting)
        elif self._connecting is None:
            # In a context of its own: a connection must not keep what belongs to the request that made it.
            self._connecting = self._loop.create_task(self._connect(), context=Context())

    async def _load(self, script: Script) -> None:
        """Have the script loaded, ahead of what waits: that may need it, too."""
        loaded = self._loading.get(script.sha)
        if loaded is None:
            loaded = self._loading[script.sha] = _Reply(loop=self._loop)
            loaded.add_done_callback(lambda done: self._loaded(script, done))
            self._waiting.appendleft((_Loading(script), b"", loaded))
            self.write()
        # A caller that is cancelled leaves it to the others.
        await asyncio.shield(loaded)

    def _loaded(self, script: Script, done: asyncio.Future[Any]) -> None:
        del self._loading[script.sha]
        if not done.cancelled():
            done.exception()  # it was seen, also where all who waited are gone

    async def _connect(self) -> None:
        try:
            self._link = await self._connected()
        except (RedisError, OSError) as error:
            self._give_up(str(error), object())
        except BaseException as error:
            self._give_up(f"the connection could not be made: {error!r}", object())
            raise
        finally:
            self._connecting = None
        self.write()

    async def _connected(self) -> _Link:
        for last in (*(False,) * (ATTEMPTS - 1), True):
            late = _Lateness(self._loop, self._timeout * LATE)
            try:
                return await self._attempt()
            except (RedisError, OSError):
                if last or not late.late:
                    raise
            finally:
                late.stop()
        raise AssertionError

    async def _attempt(self) -> _Link:
        connection = self._pool.make_connection()
        try:
            await connection.connect()
            return _Link(connection, await self._greet(connection), self._timeout, self)
        except BaseException:
            connection._close()
            raise

    async def _greet(self, connection: Any) -> str:
        """Return the run of the server that a connection leads to."""
        await connection.send_packed_command([INFO], check_health=False)
        return run_of(await connection.read_response())

    def lost(self, link: _Link, message: str, event: object) -> None:
        """Give up what waits for a connection that was lost."""
        if link is self._link:
            self._link = None
            self._give_up(message, event)

    def _give_up(self, message: str, event: object) -> None:
        """Tell all who wait that nothing was sent."""
        while self._waiting:
            _command, _name, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(NotSent(message, event))

    async def close(self) -> None:
        """Close what is open, while the loop still runs."""
        connecting, link = self._connecting, self._link
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        if link is not None:
            link.fail("the event loop ends")
            await link.gone
        await self._pool.disconnect()


class _Lateness:
    """Whether a loop is late for its own appointments, in `step` seconds each, from its making until `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, step: float) -> None:
        self._loop = loop
        self._step = step
        self.late = False
        self._wait()

    def _wait(self) -> None:
        self._due = self._loop.time() + self._step
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.late = self.late or self._loop.time() - self._due > self._step
        self._wait()

    def stop(self) -> None:
        """Look no longer."""
        self.late = self.late or self._loop.time() - self._due > self._step
        self._timer.cancel()
