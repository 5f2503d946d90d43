"""A connection to a server. All tasks of one event loop share it.

If no command waits for its reply, a new command is written at once. Otherwise all commands of one turn of the loop are
written together. (In one turn, an event loop runs all callbacks that are ready.) The server replies in the order of the
commands.

At most IN_FLIGHT commands are written and not answered. Further commands wait in order until they are written. This
wait has no time limit, because it does not mean that the server has failed. The time that the setting TIMEOUT allows
for a command begins when the command is written.
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

from ratelimits.engine.assemble.scripts import Script
from ratelimits.engine.refused import refused
from ratelimits.engine.resp import Sendable, evaluating, loading
from ratelimits.engine.run import ASK_RUN, run_after, run_of
from ratelimits.engine.transport.connection import MORE, NotSent, Unanswered, failure, refuses_writes

#: Maximum number of commands that are written and not answered. A server decides 128 commands in about 10 ms.
IN_FLIGHT = 128
#: A busy event loop can fail to connect although the server works. The loop was busy if one of its timers was late by
#: more than TIMEOUT * LATE seconds during the attempt. Then try to connect again.
LATE = 0.2
#: Maximum number of attempts to connect.
ATTEMPTS = 5
#: Maximum number of times that a script is loaded for one call. There is a maximum because the server's scripts can be
#: deleted again and again.
MAX_LOADS = 10
#: Seconds to wait for a reply after TIMEOUT: perhaps the reply has arrived, but a busy loop has not read it yet.
_LAST_LOOK = 0.001


class _Reply(asyncio.Future[Any]):
    """A reply that has not arrived yet. It can be cancelled only before its command is written.

    The server perhaps carries out a written command. So a cancelled caller must get the reply, to give back the permits
    that the command took.
    """

    written = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the reply if its command was not written. Return whether the reply was cancelled."""
        return not self.written and super().cancel(msg)


class _Loading:
    """The command SCRIPT LOAD."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        return loading(self.script)


class _Evaluated:
    """A command that sends its script's text: for a server that does not let this user load scripts."""

    def __init__(self, command: Sendable) -> None:
        self.script = command.script
        self._command = command

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        return evaluating(self._command.to_bytes(run, nonce), self.script)


class _Link(asyncio.Protocol):
    """An open connection. If it is lost, commands without a reply raise Unanswered."""

    def __init__(self, connection: Any, run: str, timeout: float, owner: Multiplexed) -> None:
        self.run = run
        #: Whether no more commands can be written.
        self.ended = False
        self._connection = connection
        self._timeout = timeout
        # The event loop refers to this object. A normal reference here would keep an unused owner in memory.
        self._owner = weakref.ref(owner)
        self._loop = asyncio.get_running_loop()
        #: For each command that is not answered, the oldest first: its `_Reply`, and the moment when it was written.
        self._sent: deque[tuple[_Reply, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        #: Whether `_look` checks once more before it closes the connection because of a late reply. With this check
        #: it becomes False. When bytes arrive, it becomes True again.
        self._last_look_is_left = False
        #: A future that is done when the socket is closed.
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=DefaultParser.parse_error, notEnoughData=MORE
        )
        # redis-py has opened the connection. From now on this object receives the bytes.
        self._transport: Any = connection._writer.transport
        self._previous_protocol = self._transport.get_protocol()
        self._transport.set_protocol(self)

    @property
    def idle(self) -> bool:
        """Return whether commands can be written and no command waits for its reply."""
        return not self._sent and not self.ended

    def write(self, waiting: deque[tuple[Sendable, bytes, _Reply]]) -> None:
        """Write waiting commands together and in order, until IN_FLIGHT commands are not answered."""
        packed = []
        room, now = IN_FLIGHT - len(self._sent), self._loop.time()
        while waiting and room:
            command, nonce, future = waiting.popleft()
            if future.done():
                continue  # the caller was cancelled: do not send the command
            try:
                packed.append(command.to_bytes(self.run, nonce))
            except Exception as error:  # noqa: BLE001  (goes to the caller of this command)
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
        """Read the replies. Give each of them to the caller of the oldest command that is not answered."""
        self._last_look_is_left = True
        reader, sent = self._reader, self._sent
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not MORE:
                future, _written_at = sent.popleft()
                if isinstance(reply, Exception):
                    reply = self._error_for_caller(reply)
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (RedisError, IndexError) as error:
            self.fail(f"the server sent an unexpected reply: {error}")
            return
        if self.ended and not sent:
            self.close()
        if (owner := self._owner()) is not None:
            owner.write()

    def _error_for_caller(self, error: Exception) -> Exception:
        """Return the error for the caller.

        If the server refuses writes, or the error is no ResponseError (such as BusyLoadingError), do not use this
        connection any more.
        """
        if isinstance(error, ResponseError) and not refuses_writes(error):
            return error
        self.ended = True
        return NotSent(str(error)) if isinstance(error, ResponseError) else failure(error)

    def _look_at(self, moment: float) -> None:
        self._last_look_is_left = True
        self._timer = self._loop.call_at(moment, self._look)

    def _look(self) -> None:
        """Check whether a reply is late. The reply to the oldest command is due first, so one timer is enough."""
        self._timer = None
        if not self._sent:
            return
        _oldest, written_at = self._sent[0]
        due, now = written_at + self._timeout, self._loop.time()
        if now < due:
            self._look_at(due)
        elif self._last_look_is_left:
            # Perhaps the reply has arrived, but the busy loop has not read it yet. Then the server has not failed.
            self._look_at(now + _LAST_LOOK)
            self._last_look_is_left = False
        else:
            self.fail(f"no reply within {self._timeout:g} s")

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all commands without a reply."""
        self._previous_protocol.connection_lost(None)
        self.gone.set_result(None)
        self.fail(f"the server closed the connection{f': {error}' if error else ''}")

    def fail(self, message: str) -> None:
        """Close the connection. Commands without a reply raise Unanswered."""
        self.close()
        event = object()  # one event: the circuit breaker counts all these errors as one failure
        while self._sent:
            future, _written_at = self._sent.popleft()
            if not future.done():
                future.set_exception(Unanswered(message, event))
        if (owner := self._owner()) is not None:
            owner.lost(self, message, event)

    def close(self) -> None:
        """Close the connection. The commands without a reply stay in `_sent`."""
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection._writer is not None:
            self._transport.abort()
            self._connection._close()


class Multiplexed:
    """The connection of one event loop to a server. `pool` is the pool of redis.asyncio that makes the connection.

    The first call connects. Other calls wait until the connection is open. If the connection is lost, the next call
    connects again. `process` is an object that stands for the process that uses the connection (see idle.py).
    """

    def __init__(self, pool: Any, timeout: float, process: object) -> None:
        self.process = process
        self._pool = pool
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._link: _Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        #: The commands that are not written yet, each with its nonce and its `_Reply`.
        self._waiting: deque[tuple[Sendable, bytes, _Reply]] = deque()
        #: By SHA-1 of a script that is being loaded: the `_Reply` of SCRIPT LOAD.
        self._loading: dict[bytes, _Reply] = {}
        #: Whether commands will be written at the next turn of the loop.
        self._write_planned = False

    async def exchange(self, command: Sendable, nonce: bytes) -> Any:
        """Send a command and return its reply. Raise NotSent, Unanswered, or the ResponseError of the server.

        If the server does not have the script, load it once for all calls that need it, and send the command again. If
        the user may not load scripts, send the script's text with the command.
        If the caller is cancelled after the command was written, the caller still gets the reply. It can ask
        `Task.cancelling()` whether it was cancelled.
        """
        for _ in range(MAX_LOADS):
            try:
                return await self._reply(command, nonce)
            except NoScriptError:
                try:
                    await self._load(command.script)
                except ResponseError as error:
                    if refused(error) is None:
                        raise
                    return await self._reply(_Evaluated(command), nonce)
        return await self._reply(command, nonce)

    async def _reply(self, command: Sendable, nonce: bytes) -> Any:
        reply = self._queue(command, nonce)
        try:
            return await reply
        except asyncio.CancelledError:
            if reply.cancelled():
                raise
            # The command was written, so the reply could not be cancelled. In this case asyncio raises CancelledError
            # only after the reply has arrived.
            return reply.result()

    def _queue(self, command: Sendable, nonce: bytes) -> _Reply:
        future = _Reply(loop=self._loop)
        self._waiting.append((command, nonce, future))
        if self._write_planned:
            return future
        if self._link is not None and self._link.idle:
            self.write()  # no command waits for its reply, so write at once
        else:
            self._write_planned = True
            self._loop.call_soon(self._planned_write)
        return future

    def _planned_write(self) -> None:
        self._write_planned = False
        self.write()

    def write(self) -> None:
        """Write waiting commands, until IN_FLIGHT commands are not answered. Without a connection, connect first."""
        if not self._waiting:
            return
        if self._link is not None and self._link.ended:
            self._link = None  # the waiting commands need another connection
        if self._link is not None:
            self._link.write(self._waiting)
        elif self._connecting is None:
            # Use an empty context, so that the connection does not keep objects of this request in memory.
            self._connecting = self._loop.create_task(self._connect(), context=Context())

    async def _load(self, script: Script) -> None:
        """Load a script. Write this command before all waiting commands: perhaps some of them need the script too."""
        loaded = self._loading.get(script.sha)
        if loaded is None:
            loaded = self._loading[script.sha] = _Reply(loop=self._loop)
            loaded.add_done_callback(lambda done: self._loaded(script, done))
            self._waiting.appendleft((_Loading(script), b"", loaded))
            self.write()
        # If this caller is cancelled, do not cancel the loading: perhaps other callers wait for the script.
        await asyncio.shield(loaded)

    def _loaded(self, script: Script, done: asyncio.Future[Any]) -> None:
        del self._loading[script.sha]
        if not done.cancelled():
            done.exception()  # asyncio logs an error that nobody has read, so read it here

    async def _connect(self) -> None:
        try:
            self._link = await self._new_link()
        except (RedisError, OSError) as error:
            self._give_up(str(error), object())
        except BaseException as error:
            self._give_up(f"the connection could not be made: {error!r}", object())
            raise
        finally:
            self._connecting = None
        self.write()

    async def _new_link(self) -> _Link:
        """Return a new connection. Try again if the event loop was late, with at most ATTEMPTS attempts in all."""
        for attempt in range(1, ATTEMPTS + 1):
            lateness = _Lateness(self._loop, self._timeout * LATE)
            try:
                return await self._try_to_connect()
            except (RedisError, OSError):
                if attempt == ATTEMPTS or not lateness.late:
                    raise
            finally:
                lateness.stop()
        raise AssertionError

    async def _try_to_connect(self) -> _Link:
        connection = self._pool.make_connection()
        try:
            await connection.connect()
            return _Link(connection, await self._greet(connection), self._timeout, self)
        except BaseException:
            connection._close()
            raise

    async def _greet(self, connection: Any) -> str:
        """Ask the server for its run and return it."""
        await connection.send_packed_command([ASK_RUN], check_health=False)
        try:
            return run_of(await connection.read_response())
        except ResponseError as error:
            return run_after(error)

    def lost(self, link: _Link, message: str, event: object) -> None:
        """Fail the waiting commands, because the connection was lost."""
        if link is self._link:
            self._link = None
            self._give_up(message, event)

    def _give_up(self, message: str, event: object) -> None:
        """Fail all waiting commands with NotSent."""
        while self._waiting:
            _command, _nonce, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(NotSent(message, event))

    async def close(self) -> None:
        """Close the connection while the loop still runs."""
        connecting, link = self._connecting, self._link
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        if link is not None:
            link.fail("the event loop ends")
            await link.gone
        await self._pool.disconnect()


class _Lateness:
    """Sets a timer every `step` seconds, until `stop`. `late` says whether one was late by more than `step` seconds."""

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
        """Stop measuring."""
        self.late = self.late or self._loop.time() - self._due > self._step
        self._timer.cancel()
