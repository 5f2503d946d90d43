"""Faults of the server of the limits, of the database and of the network. Each is made and ended under load."""

from __future__ import annotations

import itertools
import resource
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import redis
from django.db import connection, connections
from django.db.models import F

from ratelimits.embedded import EmbeddedServer
from ratelimits.engine import memory
from ratelimits.engine.counting import RefusalCount
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, Rule
from ratelimits.quota import checking
from ratelimits.quota.deny_cache import send
from ratelimits.rules.query_thread import PATIENCE
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from tests.chaos.clocks import Clock
from tests.chaos.compared import STEP
from tests.chaos.load import FLOOD, TIMEOUT, Load, request_of
from tests.support.engine.asking import usage
from tests.support.engine.proxy import Proxy
from tests.support.eventually import until
from tests.support.servers import TestServers

#: How many counters of undrained usage fill the memory of the server.
UNDRAINED = 12_000
#: How many bytes are left for new addresses.
SPARE = 200_000


class Place(NamedTuple):
    """Where a fault is made: the servers, the proxy in front of the one with the limits, a folder, and the load.

    seconds  how long a fault lasts that ends only when it is ended
    clock    the clock that the fault steps: of the server, or of the other processes of the load
    ahead    the moments (s since 1970) at which the server's clock jumped ahead
    """

    servers: TestServers
    server: EmbeddedServer
    proxy: Proxy
    folder: Path
    load: Load
    seconds: float
    clock: Clock | None
    ahead: list[float]

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.server.port)


def killed(place: Place) -> None:
    """Kill the server, and start it again with its data."""
    place.server.kill()
    place.load.wait(place.seconds)
    place.server.start()


def stopped(place: Place) -> None:
    """Stop the server's process without closing its connections (SIGSTOP)."""
    place.server.process.send_signal(signal.SIGSTOP)
    place.load.wait(place.seconds)
    place.server.process.send_signal(signal.SIGCONT)


def black_hole(place: Place) -> None:
    """Let no reply come back."""
    place.proxy.hold()
    place.load.wait(place.seconds)
    place.proxy.let_go()


def idle_dropped(place: Place) -> None:
    """Drop the connections that were idle for a second, again and again, and tell neither side of them."""
    ended = time.monotonic() + place.seconds
    while time.monotonic() < ended:
        place.load.rest(1.2)
        assert place.proxy.forget(1.0), "connections were idle"
        place.load.wait(0.3)


def torn(place: Place) -> None:
    """End connections in the middle of a reply."""
    place.proxy.tear.set()
    place.load.wait(place.seconds)
    place.proxy.tear.clear()


def full(place: Place) -> None:
    """Let undrained usage fill the server's memory, and start the worker late. Nobody raises `maxmemory`."""
    refusals = [
        RefusalCount(usage(account=f"undrained-{number}"), (1,), rule=1, version=1, requests=1)
        for number in range(UNDRAINED)
    ]
    with place.client as client:
        while refusals:
            refusals = send(current_server(), refusals)
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        place.load.wait(place.seconds)
        seal()
        assert drain().lines >= UNDRAINED
        assert client.info("memory")["used_memory"] < int(client.config_get("maxmemory")["maxmemory"])


def flooded(place: Place) -> None:
    """Let requests of ever new addresses use up the server's memory. Nobody gives it more."""
    with place.client as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + SPARE)
        ends = time.monotonic() + place.seconds
        for number in itertools.count():
            if memory.level and time.monotonic() > ends:
                break
            who, began = Identity(address=f"ip:10.{number >> 16}.{number >> 8 & 255}.{number & 255}"), time.monotonic()
            answer = checking.check(who, FLOOD)
            place.load.requests.append(request_of(began, FLOOD, who, answer))
            place.load.wait(0.001)


def _limit_files(place: Place, size: int) -> None:
    """Let each write of the server fail that makes a file longer than this, as on a full disk (but with EFBIG)."""
    resource.prlimit(place.server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _file_size(place: Place) -> int:
    return max(path.stat().st_size for path in place.server.directory.rglob("*.aof*") if path.is_file())


def disk_full(place: Place) -> None:
    """Let the server find no space for its append-only file. With `appendfsync always` it then ends. Start it again."""
    _limit_files(place, _file_size(place))
    until(lambda: place.server.process.poll() is not None, "the server ends, since it cannot write its file")
    place.load.wait(place.seconds)
    place.server.start()


def disk_full_everysec(place: Place) -> None:
    """Do the same with `appendfsync everysec`: the server refuses writes until there is space again."""
    with place.client as client:
        client.config_set("appendfsync", "everysec")
        _limit_files(place, _file_size(place))
        until(lambda: client.info("persistence")["aof_last_write_status"] == "err", "the server cannot write its file")
        place.load.wait(place.seconds)
        _limit_files(place, resource.RLIM_INFINITY)
        until(lambda: client.info("persistence")["aof_last_write_status"] == "ok", "the server writes its file again")


def clock_steps(place: Place) -> None:
    """Let the clock jump an hour ahead, and later back, then an hour back, and later ahead."""
    assert place.clock is not None
    for offset in (STEP, 0, -STEP, 0):
        if offset > place.clock.offset:
            place.ahead.append(time.time())
        place.clock.step(offset)
        place.load.wait(place.seconds / 2)


@contextmanager
def _replica(place: Place) -> Iterator[EmbeddedServer]:
    replica = EmbeddedServer(
        place.folder / "replica", aof=True, binary=place.server.binary, options={"appendfsync": "always"}
    )
    try:
        with redis.Redis(port=replica.port) as client:
            client.replicaof("127.0.0.1", place.server.port)
            until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
        yield replica
    finally:
        replica.stop()


def read_only(place: Place) -> None:
    """Lead the clients to a replica, which refuses writes."""
    with _replica(place) as replica:
        place.proxy.use(replica.port)
        place.load.wait(place.seconds)
        place.proxy.use(place.server.port)


def promoted(place: Place) -> None:
    """Attach a replica, wait until it has all data, and promote it. The old server never comes back."""
    replica = EmbeddedServer(
        place.folder / "heir", aof=True, binary=place.server.binary, options={"appendfsync": "always"}
    )
    with redis.Redis(port=replica.port) as heir, place.client as client:
        heir.replicaof("127.0.0.1", place.server.port)
        until(lambda: heir.info("replication")["master_link_status"] == "up", "the replica follows")
        place.load.wait(place.seconds)
        client.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
        offset = client.info("replication")["master_repl_offset"]
        until(lambda: heir.info("replication")["slave_repl_offset"] >= offset, "the replica has all writes")
        heir.execute_command("REPLICAOF", "NO", "ONE")
        place.proxy.use(replica.port)
    place.server.kill()
    place.server.process, place.server.port = replica.process, replica.port


def scripts_flushed(place: Place) -> None:
    """Let the server forget its scripts, again and again."""
    with place.client as client:
        for _ in range(int(place.seconds * 20)):
            client.script_flush()
            place.load.wait(0.05)


def clients_killed(place: Place) -> None:
    """Close all connections of clients, again and again."""
    with place.client as client:
        for _ in range(int(place.seconds * 10)):
            client.client_kill_filter(_type="normal", skipme=True)
            place.load.wait(0.1)


def slow(place: Place, delay: float) -> None:
    """Let each reply be late."""
    place.proxy.delay = delay
    place.load.wait(place.seconds)
    place.proxy.delay = 0.0


def database_away(place: Place) -> None:
    """Let the rules be unreadable, as with a database that is away; meanwhile they are read again and again."""
    table = ConfigVersion._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO somewhere_else")
    place.load.wait(place.seconds)
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE somewhere_else RENAME TO {table}")


def postgres_away(place: Place) -> None:
    """Stop PostgreSQL, and start it again."""
    place.servers.postgres.stop()
    place.load.wait(place.seconds)
    place.servers.postgres.ensure_postgres_running()
    connections.close_all()  # This thread's connection was to the server that has ended.


def postgres_stopped(place: Place) -> None:
    """Stop PostgreSQL's processes without closing their connections (SIGSTOP)."""
    server = psutil.Process(place.servers.postgres.get_pid())
    processes = [server, *server.children(recursive=True)]
    for process in processes:
        process.suspend()
    place.load.wait(place.seconds)
    for process in reversed(processes):
        process.resume()


def locked(place: Place) -> None:
    """Let another program hold the lock for writing the database (SQLite)."""
    with sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        place.load.wait(place.seconds)
        other.execute("ROLLBACK")
    other.close()


def edit_storm(place: Place) -> None:
    """Edit a rule about fifty times a second."""
    ended = threading.Event()
    timer = threading.Timer(place.seconds, ended.set)
    timer.start()
    while not ended.is_set():
        Rule.objects.filter(name="storm").update(capacity=F("capacity") + 1)
        place.load.wait(0.02)
    timer.join()


class Fault(NamedTuple):
    """A fault, and what it may lead to.

    reachable  whether each request gets a decision while the fault lasts
    clock      whose clock is stepped: "server" (this needs Debian's package libfaketime) or "processes"
    vendor     the only database that can have the fault
    seconds    how long the fault lasts with `--long`
    longest    the longest time that it may add to a request (s): TIMEOUT, unless a request waits for the database
    """

    name: str
    make: Callable[[Place], None]
    reachable: bool = False
    clock: str = ""
    vendor: str = ""
    seconds: float = 5.0
    longest: float = TIMEOUT


FAULTS = (
    Fault("`kill -9` of the server", killed),
    Fault("server stopped (SIGSTOP)", stopped, seconds=10.0),
    Fault("black hole: no reply comes back", black_hole),
    Fault("idle connections dropped without a word", idle_dropped, reachable=True),
    Fault("connections end in the middle of a reply", torn),
    Fault("`maxmemory` reached by undrained usage; the worker starts late", full, reachable=True),
    Fault("ever new addresses use up `maxmemory`", flooded, reachable=True),
    Fault("no space for the append-only file (`always`)", disk_full),
    Fault("no space for the append-only file (`everysec`)", disk_full_everysec),
    Fault("a replica that refuses writes", read_only),
    Fault("a replica is attached and promoted", promoted),
    Fault("`SCRIPT FLUSH`, 20 a second", scripts_flushed, reachable=True),
    Fault("`CLIENT KILL`, 10 a second", clients_killed),
    Fault("replies 100 ms late", lambda place: slow(place, 0.1), reachable=True),
    Fault("replies 300 ms late", lambda place: slow(place, 0.3)),
    Fault("the server's clock: an hour ahead, then an hour behind", clock_steps, reachable=True, clock="server"),
    Fault("the web processes' clock: an hour ahead, then behind", clock_steps, reachable=True, clock="processes"),
    Fault("database away", database_away),
    Fault("PostgreSQL away for 60 s", postgres_away, vendor="postgresql", seconds=60.0),
    Fault("PostgreSQL stopped (SIGSTOP)", postgres_stopped, vendor="postgresql", seconds=10.0, longest=PATIENCE),
    Fault("SQLite locked for writing", locked, reachable=True, vendor="sqlite"),
    Fault("50 edits a second", edit_storm, reachable=True),
)
