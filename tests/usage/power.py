"""Power cuts: a server is killed, and its append-only file loses every byte that was not fsynced.

A kill alone is no power cut: what a process wrote and did not fsync outlives it in the kernel. So one thread writes
numbered markers into the file, and another watches the server's fsync thread: whenever that has run, the newest marker
may be on disk. At the cut the server is stopped, so that every answer that it has given arrives, then killed, and the
file is cut behind that marker: never before what was fsynced, and hardly behind it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import redis

from ratelimits.embedded import Server
from tests.eventually import PATIENCE, until
from tests.usage.background import Background

_PAUSE = 0.001
_DIGITS = 12
_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207
_WALL = 0x40000000


class Cut(NamedTuple):
    """When the power was cut (µs), and how many bytes were lost."""

    at: int
    lost: int


class Fsyncs(Background):
    """Watches which marker the file is fsynced up to, until the block is left."""

    def __init__(self, server: Server) -> None:
        super().__init__(self._write, self._watch)
        self.server = server
        self._cutting = threading.Lock()
        self._thread = _fsync_thread(server.process.pid)
        self._switches = _switches(self._thread)
        self._written = 0
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
                    client.set("marker", _marker(self._written + 1))
                except redis.TimeoutError:  # a slow disk
                    continue
                except redis.ConnectionError:
                    return
                self._written += 1
                time.sleep(_PAUSE)

    def _watch(self) -> None:
        while not self._end.is_set():
            with self._cutting:
                self._look()
            time.sleep(_PAUSE)

    def _look(self) -> None:
        switches = _switches(self._thread)
        if switches != self._switches:
            self._switches, self._fsynced = switches, self._written

    def cut(self, after: float) -> Cut:
        """Cut the power so many seconds after an fsync, and start the server again."""
        seen = self._fsynced
        until(lambda: self._fsynced > seen, "an fsync")
        time.sleep(after)
        with self._cutting:
            self._look()
            os.kill(self.server.process.pid, signal.SIGSTOP)
            at = time.time_ns() // 1000
            self._end.set()
        # Answers that were given before are still on their way.
        time.sleep(0.1)
        self.server.kill()
        for thread in self._threads:
            thread.join()
        (path,) = (self.server.directory / "appendonlydir").glob("*.incr.aof")
        lost = _truncate(path, self._fsynced)
        self.server.start()
        return Cut(at, lost)


def _fsync_thread(pid: int) -> Path:
    """Where the kernel tells of the server's thread that fsyncs."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return next(task for task in tasks if (task / "comm").read_text().startswith("bio_aof"))


@contextmanager
def stalled_disk(server: Server) -> Iterator[None]:
    """Nothing is fsynced in the background until the block is left, as with a disk that takes so long for it."""
    thread = int(_fsync_thread(server.process.pid).name)
    _ptrace(_PTRACE_SEIZE, thread)
    _ptrace(_PTRACE_INTERRUPT, thread)
    os.waitpid(thread, _WALL)
    try:
        yield
    finally:
        _ptrace(_PTRACE_DETACH, thread)


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(request, thread, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")


def wait_for_fsync(server: Server, client: redis.Redis) -> None:
    """Until the thread that fsyncs has just done so: the next fsync is a second away."""
    thread = _fsync_thread(server.process.pid)
    before, deadline = _switches(thread), time.monotonic() + PATIENCE
    while _switches(thread) == before:
        assert time.monotonic() < deadline, "waited in vain for an fsync"
        client.set("n", 0)  # again and again: the fsync of a single write may have passed before it is looked for
        time.sleep(_PAUSE)


def _switches(thread: Path) -> str:
    """How often the thread has gone to sleep: whenever an fsync waits for the disk, and when it has ended."""
    lines = (thread / "status").read_text().splitlines()
    return next(line for line in lines if line.startswith("voluntary_ctxt_switches"))


def _marker(number: int) -> bytes:
    return b"%0*d" % (_DIGITS, number)


def _truncate(path: Path, marker: int) -> int:
    data = path.read_bytes()
    found = b"$6\r\nmarker\r\n$%d\r\n%b\r\n" % (_DIGITS, _marker(marker))
    end = data.rindex(found) + len(found)
    with path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())
    return len(data) - end
