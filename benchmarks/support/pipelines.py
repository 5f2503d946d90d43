"""Many commands at once over a raw socket: to fill a server with keys, and to find out how many decisions it makes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis

from ratelimits.engine.call import Call, Command, nonce
from ratelimits.engine.decision import read
from ratelimits.engine.keys import BIN_SECONDS, shard_of
from ratelimits.engine.server import Server
from ratelimits.engine.transport.connection import run_named

#: Commands in one batch; two batches are under way at a time, so that the server never waits for the next.
BATCH = 100
#: Ids of users who have live keys are numbers of seven digits, from here on.
FIRST_ID = 1_000_000


def run_of(client: redis.Redis) -> str:
    """Return the run of the server, as connections learn it: with another, each command would ask for it anew."""
    return run_named(client.info())


def wait_for_bin(seconds: float) -> None:
    """Commands that are made once hold for the usage bin of their moment: wait for the next if this one ends soon."""
    left = BIN_SECONDS - time.time() % BIN_SECONDS
    if left < seconds + 1:
        time.sleep(left + 0.1)


def check(reply: Any) -> None:
    """AssertionError unless a decision's reply, or the bare script's, admits."""
    # The bare script answers with a list.
    if tuple(reply[:2] if isinstance(reply, list) else read(reply)[:2]) != (1, 1):
        raise AssertionError(f"a decision was answered with {reply}")


class Pipeline:
    """A raw connection that sends batches ahead of the replies. Errors, and decisions that admit nothing, raise."""

    def __init__(self, url: str) -> None:
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
                check(reply)
                count -= 1

    def send(self, batches: Iterable[bytes], size: int = BATCH, ended: Callable[[], bool] = lambda: False) -> int:
        """Send batches of so many commands until they or the time are over; how many commands were answered."""
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
    """Commands in batches of this size; what is left over is not sent."""
    commands = iter(commands)
    while len(chunk := list(islice(commands, size))) == size:
        yield b"".join(chunk)


def for_users(server: Server, run: str, call_of: Callable[[str], Call], ids: Iterable[int]) -> Iterator[bytes]:
    """The command of each of these users, who are accounts of their own: made once for each shard, and filled in."""
    templates: dict[int, tuple[bytes, bytes]] = {}
    for number in ids:
        name = str(number)
        shard = shard_of(f"account:{name}", server.keyspace.shards)
        template = templates.get(shard)
        if template is None:
            packed = Command(server.keyspace, call_of(name)).to(run, nonce())
            template = templates[shard] = packed, name.encode()
        yield template[0].replace(template[1], name.encode())


def per_second(url: str, batches: list[bytes], seconds: float) -> tuple[float, float]:
    """Commands per second that one server answers, and the share of its core that it used meanwhile."""
    pipeline = Pipeline(url)
    with redis.Redis.from_url(url) as client:

        def processor() -> float:
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
