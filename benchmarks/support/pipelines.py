"""Send many commands at once over a raw socket, to fill a server with keys or to measure its decisions per second."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis

from ratelimits.engine.call import Call, new_nonce
from ratelimits.engine.command import Command
from ratelimits.engine.decision import read
from ratelimits.engine.keys import BIN_SECONDS, Keyspace, shard_of
from ratelimits.engine.transport.connection import read_run

#: Number of commands in one batch. Two batches are sent before the replies are read, so that the server never waits.
BATCH = 100
#: The id of the first user. All ids have seven digits.
FIRST_ID = 1_000_000


def run_of(client: redis.Redis) -> str:
    """Return the run of the server. If a command names another run, the script has to ask the server for its run."""
    return read_run(client)


def wait_for_bin(seconds: float) -> None:
    """If the usage bin ends within these seconds, wait for the next bin: prepared commands are valid in one bin."""
    left = BIN_SECONDS - time.time() % BIN_SECONDS
    if left < seconds + 1:
        time.sleep(left + 0.1)


def check(reply: Any, allowed: bool | None = True) -> None:
    """Raise AssertionError if the request was not decided, or not decided as expected.

    `allowed` is the expected decision: True admits, False refuses, None allows both.
    """
    # The reply of the bare script is a list, and the reply of the app's script is packed. Both begin with two numbers:
    # 1 if the request was decided, and 1 if it was admitted.
    decided, admitted = reply[:2] if isinstance(reply, list) else read(reply)[:2]
    if decided != 1 or allowed not in (None, bool(admitted)):
        raise AssertionError(f"a decision was answered with {reply}")


class Pipeline:
    """A raw connection that sends batches before it reads the replies.

    `allowed` is the expected decision of each reply, as in `check`. Another decision raises AssertionError.
    """

    def __init__(self, url: str, allowed: bool | None = True) -> None:
        self._allowed = allowed
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def _read(self, count: int) -> None:
        while count:
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(1 << 20))
            elif isinstance(reply, Exception):
                raise reply
            else:
                check(reply, self._allowed)
                count -= 1

    def send(self, batches: Iterable[bytes], size: int = BATCH, ended: Callable[[], bool] = lambda: False) -> int:
        """Send batches of `size` commands until none is left or `ended` returns True. Return the number of replies."""
        ahead = answered = 0
        for batch in batches:
            self._socket.sendall(batch)
            ahead += 1
            if ahead == 2:
                self._read(size)
                ahead, answered = 1, answered + size
                if ended():
                    break
        self._read(ahead * size)
        return answered + ahead * size

    def close(self) -> None:
        self._socket.close()


def batched(commands: Iterable[bytes], size: int = BATCH) -> Iterator[bytes]:
    """Return the commands in batches of this size. Leave out the last commands if they do not fill a batch."""
    commands = iter(commands)
    while len(chunk := list(islice(commands, size))) == size:
        yield b"".join(chunk)


def for_users(keyspace: Keyspace, run: str, call_of: Callable[[str], Call], ids: Iterable[int]) -> Iterator[bytes]:
    """Return the command of each of these users. Each user has an account of their own.

    For speed, one command is made for each shard. For other users of the shard, only the id in this command is
    replaced.
    """
    # Shard -> the command that was made for this shard, and the user's id in this command.
    made: dict[int, tuple[bytes, bytes]] = {}
    for number in ids:
        user = str(number)
        shard = shard_of(f"account:{user}", keyspace.shards)
        if shard not in made:
            made[shard] = Command(keyspace, call_of(user)).to_bytes(run, new_nonce()), user.encode()
        command, first_user = made[shard]
        yield command.replace(first_user, user.encode())


def per_second(url: str, batches: list[bytes], seconds: float, allowed: bool | None = True) -> tuple[float, float]:
    """Return the commands per second that one server answers, and the used part of the server's core (1: all of it)."""
    pipeline = Pipeline(url, allowed)
    with redis.Redis.from_url(url) as client:

        def processor() -> float:
            """Return the processor time in seconds: of the main thread, or of all threads if the server is old."""
            info = client.info("cpu")
            names = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
            return sum(float(info.get(name, info[name.removesuffix("_main_thread")])) for name in names)

        def forever() -> Iterator[bytes]:
            while True:
                yield from batches

        used, start = processor(), time.perf_counter()
        answered = pipeline.send(forever(), ended=lambda: time.perf_counter() - start >= seconds)
        elapsed, used = time.perf_counter() - start, processor() - used
    pipeline.close()
    return answered / elapsed, used / elapsed
