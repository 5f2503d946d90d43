"""The shortest possible times: a round trip, and a bare script that does only the necessary work."""

from __future__ import annotations

import hashlib
import socket
import struct
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import redis

from benchmarks.support.timing import Case
from ratelimits.engine.assemble.scripts import resp

BARE = (Path(__file__).parent / "bare.lua").read_bytes()
#: A script that does nothing, and replies as if it admitted a request.
EMPTY = b"return {1, 1}"
PING = resp(b"PING")
#: An expected head with the length of a real one. A head contains the version of the rules and the run.
_HEAD = b"1 " + b"0" * 40 + b":" + b"0" * 40


class RawSocket:
    """A plain socket to the server, without a client library."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, packed: bytes) -> bytes:
        """Send a command and return the bytes of the reply, which must arrive in one piece."""
        self._socket.sendall(packed)
        return self._socket.recv(65536)

    def close(self) -> None:
        self._socket.close()


def sha_of(script: bytes) -> bytes:
    """Return the SHA-1 by which a script is called."""
    return hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()


def bare(heads: int, states: int, each: int, counted: bool, suffix: str = "42") -> bytes:
    """Return the command that calls the bare script. measured/bare.lua explains the arguments of the script.

    heads    number of heads, each of which the script compares with the expected head
    states   number of states, each for one key
    each     number of limits in each state
    counted  whether the script also counts the request as usage
    suffix   the id of the user
    """
    keys = [f"bare:{{{number:02d}}}:head" for number in range(heads)]
    keys += [f"bare:{{00}}:s:{each}:{number}:{suffix}" for number in range(states)]
    keys += ["bare:{00}:open"] if counted else []
    # Each limit is a bucket whose level is a time. A request adds 10 µs. It is refused if the level would exceed 10 s.
    numbers = struct.pack(f"<{2 * states * each}d", *(10.0, 10_000_000.0) * (states * each))
    # The end of a counter's name: meter, rule, version, account, key, and the cost of each request (1).
    field = f"|requests|3|7|7|user:{suffix}|1" if counted else ""
    # Formats of Lua's struct: a state has two 7-byte numbers for each limit, the other numbers are doubles.
    formats = b"<" + b"I7I7" * each, b"<" + b"d" * (2 * states * each)
    arguments = [struct.pack("<BBB", heads, states, each), _HEAD, numbers, field.encode(), *formats]
    return resp(b"EVALSHA", sha_of(BARE), b"%d" % len(keys), *(key.encode() for key in keys), *arguments)


#: The arguments `heads`, `states`, `each` and `counted` of `bare` for three rules on one key, with metering.
THREE_RULES = (1, 1, 3, True)
#: Name, title, and the same four arguments of `bare`. "kinds" has keys of three kinds: user, account and global.
SHAPES = (
    ("bare_one", "bare script, one rule", (1, 1, 1, False)),
    ("bare_three", "bare script, 3 rules on one key + metering", THREE_RULES),
    ("bare_kinds", "bare script, user + account + global + metering", (2, 3, 1, True)),
)


def load(url: str) -> None:
    """Load the bare script and the empty script into the server."""
    with redis.Redis.from_url(url) as client:
        for script in (BARE, EMPTY):
            client.script_load(script)


def answers_list(raw: RawSocket, packed: bytes) -> bool:
    """Return whether the server's reply to this command is a list, and not an error."""
    return raw.exchange(packed)[:1] == b"*"


def cases(url: str) -> list[Case]:
    """Return the cases: a PING and the bare script, both on a raw socket."""
    load(url)
    raw = RawSocket(url)

    out = [Case("ping", "raw-socket PING", "floor", lambda: raw.exchange(PING) == b"+PONG\r\n")]
    for name, title, shape in SHAPES:
        packed = bare(*shape)
        out.append(Case(name, title, "floor", partial(answers_list, raw, packed)))
    return out
