"""A connection to a server. All tasks of one event loop share it.

If no command waits for its reply, a new command is written at once. Otherwise all commands of one turn of the loop are
written together. (In one turn, an event loop runs all callbacks that are ready.) The server replies in the order of the
commands.

At most IN_FLIGHT commands are written and not answered. Further commands wait in order until they are written. This
wait has no time limit, because it does not mean that the server has failed. The time that the setting TIMEOUT allows
for a command begins when the command is written.
link.py has the connection. Commands that were not written on a lost connection are written on the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from contextvars import Context
from typing import Any

from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError

from ratelimits.engine.assemble.scripts import Script, Sendable, evaluating, loading
from ratelimits.engine.transport.ages import Ages
from ratelimits.engine.transport.connection import ASK_RUN, NotSent, run_after, run_of
from ratelimits.engine.transport.idle import process
from ratelimits.engine.transport.link import Link, Ping, Reply, Waiting
from ratelimits.engine.transport.refused import refused

#: A busy event loop can fail to connect although the server works. The loop was busy if one of its timers was late by
#: more than TIMEOUT * LATE seconds during the attempt. Then try to connect again.
LATE = 0.2
#: Maximum number of attempts to connect.
ATTEMPTS = 5
#: Maximum number of times that a script is loaded for one call. There is a maximum because the server's scripts can be
#: deleted again and again.
MAX_LOADS = 10


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


class Multiplexed:
    """The connection of one event loop to a server. `pool` is the pool of redis.asyncio that makes the connection.

    The first call connects. Other calls wait until the connection is open. If the connection is lost, the next call
    connects again. `process` is an object that stands for the process that uses the connection (see idle.py).
    """

    def __init__(self, pool: Any, timeout: float, ages: Ages) -> None:
        self.process = process()
        self._thread = threading.current_thread()
        self.ages = ages
        self._pool = pool
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        #: Whether there were new credentials after the task began to connect.
        self._renewed = False
        self._waiting: deque[Waiting] = deque()
        #: How long the last connection was idle, if no answer came on it (s).
        self._silent = 0.0
        #: By SHA-1 of a script that is being loaded: the `Reply` of SCRIPT LOAD.
        self._loading: dict[bytes, Reply] = {}
        #: Whether commands will be written at the next turn of the loop.
        self._write_planned = False

    @property
    def is_left(self) -> bool:
        """Return whether nobody uses the loop any more: it is closed, or its thread of this process has ended."""
        # In a forked child, all other threads have ended. But the parent still uses their connections.
        thread_ended = self.process is process() and not self._thread.is_alive() and not self._loop.is_running()
        return self._loop.is_closed() or thread_ended

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

    def _queue(self, command: Sendable, nonce: bytes) -> Reply:
        future = Reply(loop=self._loop)
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
        if self._link is not None and not self._link.ended:
            self._link.write(self._waiting)
        if self._link is not None and self._link.ended:
            self._link = None  # the waiting commands need another connection
        if self._link is None and self._connecting is None:
            # Use an empty context, so that the connection does not keep objects of this request in memory.
            self._connecting = self._loop.create_task(self._connect(), context=Context())

    async def _load(self, script: Script) -> None:
        """Load a script. Write this command before all waiting commands: perhaps some of them need the script too."""
        loaded = self._loading.get(script.sha)
        if loaded is None:
            loaded = self._loading[script.sha] = Reply(loop=self._loop)
            loaded.add_done_callback(lambda done: self._loaded(script, done))
            self._waiting.appendleft((_Loading(script), b"", loaded))
            self.write()
        # If this caller is cancelled, do not cancel the loading: perhaps other callers wait for the script.
        await asyncio.shield(loaded)

    def _loaded(self, script: Script, done: asyncio.Future[Any]) -> None:
        del self._loading[script.sha]
        if not done.cancelled():
            done.exception()  # asyncio logs an error that nobody has read, so read it here

    def repeat(self, commands: list[Waiting], reason: str) -> None:
        """Let commands wait again, before all others, with which the server did nothing for this reason.

        A command for which this happens twice raises NotSent.
        """
        for one in reversed(commands):
            command, _nonce, reply = one
            if reply.repeated and not reply.done():
                reply.set_exception(NotSent(reason))
            elif not isinstance(command, Ping):
                reply.written, reply.repeated = False, True
                self._waiting.appendleft(one)

    def was_silent(self, idle: float) -> None:
        """Note that no answer came on a connection that was idle for `idle` seconds. Perhaps the server is away."""
        self._silent = idle

    def renew(self) -> None:
        """Replace the connection before its next use. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end_link)

    def _end_link(self) -> None:
        self._renewed = self._connecting is not None
        if self._link is not None:
            self._link.end()

    async def _connect(self) -> None:
        try:
            self._link = await self._new_link()
        except (RedisError, OSError) as error:
            self._silent = 0.0
            self._give_up(str(error), object())
        except BaseException as error:
            self._give_up(f"the connection could not be made: {error!r}", object())
            raise
        else:
            if self._silent:
                self.ages.was_silent(self._silent)
                self._silent = 0.0
        finally:
            self._connecting = None
        self.write()
        if self._renewed:
            self._end_link()  # perhaps it has the earlier credentials: use it only for these commands

    async def _new_link(self) -> Link:
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

    async def _try_to_connect(self) -> Link:
        connection = self._pool.make_connection()
        try:
            try:
                await connection.connect()
            except AuthenticationError:
                if connection.credential_provider is None:
                    raise
                await connection.connect()  # the credentials changed after the provider was asked; it has new ones now
            return Link(connection, await self._greet(connection), self._timeout, self)
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

    def lost(self, link: Link, message: str, event: object) -> None:
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
            self._give_up("the event loop ends", object())
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
