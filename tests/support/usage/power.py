"""Simulate a power cut: kill a server, and cut its append-only file to the bytes that were fsynced.

A kill alone is not a power cut: bytes that a process wrote but did not fsync survive in the kernel. So one thread keeps
the server writing, and another watches the server's fsync thread. When that thread has run, all bytes of the file may
be on disk, and the length of the file is noted. At the cut, the server is paused, so that all its answers arrive, and
then killed. The file is cut to the noted length. This is never less than the fsynced bytes, and hardly more.

An acknowledged write may not be in the file: under `everysec` the server answers, but keeps a write in memory while an
fsync runs, for up to two seconds. So the test looks at the file, not at the answers.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import redis

from ratelimits.embedded import EmbeddedServer
from tests.support.eventually import PATIENCE, until
from tests.support.usage.background import Background

_PAUSE = 0.001
_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207
_WALL = 0x40000000


class Cut(NamedTuple):
    """The time of a power cut (µs), and the number of bytes that were lost."""

    at: int
    lost: int


class Fsyncs(Background):
    """Watch up to which byte the file is fsynced, until the block is left."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__(self._write, self._watch)
        self.server = server
        self._cutting = threading.RLock()
        self._thread = _fsync_thread(server.process.pid)
        self._switches = _switches(self._thread)
        (self._file,) = (server.directory / "appendonlydir").glob("*.incr.aof")
        self._fsynced = 0

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            until(lambda: self._fsynced, "a first fsync")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _write(self) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            while not self._end.is_set():
                try:
                    client.incr("written")
                except redis.TimeoutError:  # a slow disk
                    continue
                except redis.ConnectionError:
                    return
                time.sleep(_PAUSE)

    def _watch(self) -> None:
        while not self._end.is_set():
            self.look()
            time.sleep(_PAUSE)

    def look(self, ran: bool = False) -> None:
        """Record the file's length if the fsync thread has run since the last look, or if `ran` says so."""
        with self._cutting:
            switches = _switches(self._thread)
            if ran or switches != self._switches:
                self._switches, self._fsynced = switches, self._file.stat().st_size

    def cut(self, after: float) -> Cut:
        """Cut the power this many seconds after an fsync, and start the server again."""
        seen = self._fsynced
        until(lambda: self._fsynced > seen, "an fsync")
        time.sleep(after)
        with self._cutting:
            self.look()
            os.kill(self.server.process.pid, signal.SIGSTOP)
            at = time.time_ns() // 1000
            self._end.set()
        # Wait for answers that the server has sent but that have not arrived yet.
        time.sleep(0.1)
        self.server.kill()
        for thread in self._threads:
            thread.join()
        lost = _truncate(self._file, self._fsynced)
        self.server.start()
        return Cut(at, lost)


def _fsync_thread(pid: int) -> Path:
    """Return the kernel's file about the server's fsync thread. Wait until the thread has its name."""
    tasks = Path(f"/proc/{pid}/task")

    def named() -> Path | None:
        return next((task for task in tasks.iterdir() if _name(task).startswith("bio_aof")), None)

    thread: Path = until(named, "the server's fsync thread")
    return thread


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except FileNotFoundError:  # it has ended
        return ""


@contextmanager
def stalled_disk(server: EmbeddedServer) -> Iterator[None]:
    """Stop the background fsync during the block, like a very slow disk."""
    thread = int(_fsync_thread(server.process.pid).name)
    _ptrace(_PTRACE_SEIZE, thread)
    _ptrace(_PTRACE_INTERRUPT, thread)
    os.waitpid(thread, _WALL)
    try:
        yield
    finally:
        _ptrace(_PTRACE_DETACH, thread)


def unwritten(server: EmbeddedServer, client: redis.Redis) -> bytes:
    """Write until the server acknowledges a write that it keeps only in memory; return the key of that write.

    The server does this while the disk is stalled, for up to two seconds.
    """
    written = itertools.count()

    def kept_back() -> bytes | None:
        key = b"acknowledged-%d" % next(written)
        client.set(key, 1)
        return None if is_written(server, key) else key

    key: bytes = until(kept_back, "a write that is kept back")
    return key


def is_written(server: EmbeddedServer, key: bytes) -> bool:
    """Return whether a key is in the append-only file."""
    return any(key + b"\r\n" in path.read_bytes() for path in server.directory.rglob("*.aof"))


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, thread, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")


def wait_for_fsync(server: EmbeddedServer, client: redis.Redis) -> None:
    """Wait until the fsync thread has just run, so that the next fsync is one second away."""
    thread = _fsync_thread(server.process.pid)
    before, deadline = _switches(thread), time.monotonic() + PATIENCE
    while _switches(thread) == before:
        assert time.monotonic() < deadline, "waited in vain for an fsync"
        client.set("n", 0)  # write repeatedly, because the fsync of a single write may be over before the next look
        time.sleep(_PAUSE)


def _switches(thread: Path) -> str:
    """Return how often the thread went to sleep: when an fsync waits for the disk, and when it has ended."""
    lines = (thread / "status").read_text().splitlines()
    return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))


def _truncate(path: Path, size: int) -> int:
    """Cut the file to `size` bytes; return how many bytes were cut off."""
    lost = path.stat().st_size - size
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())
    return lost
