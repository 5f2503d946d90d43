"""One connection that all tasks of an event loop share, and the commands that are written on it.

The server replies in the order of the commands. If the connection was idle, the server is asked, or the connection is
closed, before a command is written (see ages.py).
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from typing import Any, Protocol

import hiredis
from redis.asyncio.connection import DefaultParser
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError

from ratelimits.engine.assemble.scripts import Script, Sendable
from ratelimits.engine.transport.ages import JUST_NOW, PING, Ages, ended
from ratelimits.engine.transport.connection import MORE, Unanswered, failure, refuses_writes

#: Maximum number of commands that are written and not answered. A server decides 128 commands in about 10 ms.
IN_FLIGHT = 128
#: Seconds to wait for a reply after TIMEOUT: perhaps the reply has arrived, but a busy loop has not read it yet.
_LAST_LOOK = 0.001


class Reply(asyncio.Future[Any]):
    """A reply that has not arrived yet. It can be cancelled only before its command is written.

    The server perhaps carries out a written command. So a cancelled caller must get the reply, to give back the permits
    that the command took.
    """

    written = False
    #: Whether the command was written twice, because the server did nothing with it at first.
    repeated = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the reply if its command was not written. Return whether the reply was cancelled."""
        return not self.written and super().cancel(msg)


#: A command that is not written yet, its nonce, and its reply. This is a plain tuple: each decision makes one.
Waiting = tuple[Sendable, bytes, Reply]


class Ping:
    """The command PING."""

    script = Script(b"", b"")  # the command needs no script

    def to_bytes(self, run: str, nonce: bytes) -> bytes:
        return PING


def _did_nothing(error: Exception) -> bool:
    """Return whether the server did nothing with a command, which may be sent on another connection."""
    return isinstance(error, AuthenticationError) or (isinstance(error, ResponseError) and refuses_writes(error))


class Owner(Protocol):
    """Has the waiting commands, and makes a new connection when they need one."""

    @property
    def ages(self) -> Ages: ...

    def write(self) -> None:
        """Write waiting commands. Without a connection, connect first."""

    def repeat(self, commands: list[Waiting], reason: str) -> None:
        """Let commands wait again, before all others, with which the server did nothing for this reason."""

    def was_silent(self, idle: float) -> None:
        """Note that no answer came on a connection that was idle for so many seconds."""

    def lost(self, link: Link, message: str, event: object) -> None:
        """Fail the waiting commands, because the connection was lost."""


class Link(asyncio.Protocol):
    """An open connection. If it is lost, commands without a reply raise Unanswered."""

    def __init__(self, connection: Any, run: str, timeout: float, owner: Owner) -> None:
        self.run = run
        #: Whether no more commands can be written.
        self.ended = False
        self._connection = connection
        self._timeout = timeout
        self._ages = owner.ages
        # The event loop refers to this object. A normal reference here would keep an unused owner in memory.
        self._owner = weakref.ref(owner)
        self._loop = asyncio.get_running_loop()
        #: The commands that are not answered, the oldest first. For each of them: the moment when its reply is due.
        self._sent: deque[tuple[Waiting, float]] = deque()
        #: The moment when commands were last written, or replies came. If no command is written for some time after it,
        #: the server is asked before the next command. (`loop.time` of some event loops tells only milliseconds.)
        self._used = time.monotonic()
        #: The reply to PING, until it was noticed. No other command is written meanwhile.
        self._asked: Reply | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: When the connection must be replaced (s, monotonic), and whether commands were written on it before.
        self._until, self._has_begun = self._ages.until(), False
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
        self._socket: Any = self._transport.get_extra_info("socket")
        self._previous_protocol = self._transport.get_protocol()
        self._transport.set_protocol(self)

    @property
    def idle(self) -> bool:
        """Return whether commands can be written and no command waits for its reply."""
        return not self._sent and not self.ended

    def write(self, waiting: deque[Waiting]) -> None:
        """Write waiting commands together and in order, until IN_FLIGHT commands are not answered.

        Write nothing if the connection ends because it was idle too long, or is too old, or because the other side has
        ended it. Write nothing while the server is asked.
        """
        now = time.monotonic()
        idle = now - self._used
        # Perhaps the event loop has not read the end yet.
        if (self._has_begun and now > self._until) or (idle > JUST_NOW and ended(self._socket)):
            self.end()
            return
        if idle > self._ages.asked and not self._is_alive(idle):
            return
        self._used = now
        packed = []
        room, due = IN_FLIGHT - len(self._sent), self._loop.time() + self._timeout
        while waiting and room:
            one = command, nonce, reply = waiting.popleft()
            if reply.done():
                continue  # the caller was cancelled: do not send the command
            try:
                data = command.to_bytes(self.run, nonce)
            except Exception as error:  # noqa: BLE001  (goes to the caller of this command)
                reply.set_exception(error)
                continue
            packed.append(data)
            reply.written = True
            self._sent.append((one, due))
            room -= 1
        if packed:
            self._has_begun = True
            self._transport.write(b"".join(packed))
            if self._timer is None:
                self._look_at(due)

    def _is_alive(self, idle: float) -> bool:
        """Return whether a connection may be used on which nothing was written for `idle` seconds.

        If it was idle too long, close it. Otherwise ask the server, whose answer then lets the owner write.
        """
        if self._asked is not None:
            return False
        if self._sent:
            return True
        if idle > self._ages.oldest:
            self.close()
            return False
        self._asked, due = Reply(loop=self._loop), self._loop.time() + self._ages.wait
        self._sent.append(((Ping(), b"", self._asked), due))
        self._transport.write(PING)
        self._look_at(due)
        return False

    def data_received(self, data: bytes) -> None:
        """Read the replies. Give each of them to the caller of the oldest command that is not answered."""
        self._last_look_is_left = True
        reader, sent = self._reader, self._sent
        #: Commands with which the server did nothing, because it wants other credentials or refuses writes. A new
        #: connection has the newest credentials, and leads to the primary.
        refused, reason = [], ""
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not MORE:
                one, _due = sent.popleft()
                future = one[2]
                if isinstance(reply, Exception):
                    if _did_nothing(reply):
                        self.ended, reason = True, str(reply)
                        refused.append(one)
                        continue
                    reply = self._error_for_caller(reply)
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        except (RedisError, IndexError) as error:
            self.fail(f"the server sent an unexpected reply: {error}")
        if self._asked is not None and self._asked.done():
            self._asked.exception()  # an error is an answer too: perhaps the user may not send PING
            self._asked = None
        if self._asked is None:
            self._used = time.monotonic()
        if self.ended and not sent:
            self.close()
        if (owner := self._owner()) is not None:
            if refused:
                owner.repeat(refused, reason)
            owner.write()

    def _error_for_caller(self, error: Exception) -> Exception:
        """Return the error for the caller.

        If the error is no ResponseError (such as BusyLoadingError), do not use this connection any more.
        """
        if isinstance(error, ResponseError):
            return error
        self.ended = True
        return failure(error)

    def _look_at(self, moment: float) -> None:
        self._last_look_is_left = True
        self._timer = self._loop.call_at(moment, self._look)

    def _look(self) -> None:
        """Check whether a reply is late. The reply to the oldest command is due first, so one timer is enough."""
        self._timer = None
        if not self._sent:
            return
        (_oldest, due), now = self._sent[0], self._loop.time()
        if now < due:
            self._look_at(due)
        elif self._last_look_is_left:
            # Perhaps the reply has arrived, but the busy loop has not read it yet. Then the server has not failed.
            self._look_at(now + _LAST_LOOK)
            self._last_look_is_left = False
        else:
            if self._asked is not None and (owner := self._owner()) is not None:
                owner.was_silent(time.monotonic() - self._used)
            self.fail(f"no reply within {self._timeout:g} s")

    def eof_received(self) -> None:
        """Write no more commands. The transport now closes itself, and calls `connection_lost`."""
        self.ended = True

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all commands without a reply."""
        self._previous_protocol.connection_lost(None)
        self.gone.set_result(None)
        self._fail_sent(f"the server closed the connection{f': {error}' if error else ''}", object())
        if (owner := self._owner()) is not None:
            owner.write()

    def fail(self, message: str) -> None:
        """Close the connection, because the server does not answer. Commands without a reply raise Unanswered."""
        was_asked, event = self._asked is not None, object()
        self._fail_sent(message, event)
        owner = self._owner()
        if owner is not None and was_asked:
            owner.write()  # the waiting commands need another connection, and none of them has failed
        elif owner is not None:
            owner.lost(self, message, event)

    def _fail_sent(self, message: str, event: object) -> None:
        """Close the connection, and raise Unanswered in the callers of commands that were written.

        The circuit breaker counts errors with the same event as one failure.
        """
        self.close()
        if self._asked is not None:
            self._sent.clear()  # only PING was written
            self._asked = None
        while self._sent:
            (_command, _nonce, future), _due = self._sent.popleft()
            if not future.done():
                future.set_exception(Unanswered(message, event))

    def end(self) -> None:
        """Write no more commands, and close the connection when all commands are answered."""
        self.ended = True
        if not self._sent:
            self.close()

    def close(self) -> None:
        """Close the connection. The commands without a reply stay in `_sent`."""
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection._writer is not None:
            self._transport.abort()
            self._connection._close()
