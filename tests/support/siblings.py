"""Siblings: processes that work in parallel on orders from a test. One process sets Django up and forks the others.

A server with `--preload` starts its workers in the same way. A module for siblings ends with `django.setup();
obey(work)`. A test enters `siblings(module, count)`, and exchanges lines of JSON with each process.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from tests.support.forked import Forked

ROOT = Path(__file__).resolve().parents[2]


class Sibling:
    """One of the processes."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def ask(self, order: Any) -> None:
        """Send an order."""
        print(json.dumps(order), file=self._lines, flush=True)

    def answer(self) -> Any:
        """Wait for the answer to an order."""
        return json.loads(self._lines.readline())


@contextmanager
def siblings(
    module: str, count: int, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[list[Sibling]]:
    """Start this number of processes and wait until all are ready. They end at the end of the block."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [their.fileno() for _own, their in pairs]
        process = Forked(
            [sys.executable, "-m", module, ",".join(map(str, theirs)), *arguments],
            env=environment,
            cwd=ROOT,
            pass_fds=theirs,
        )
        stack.enter_context(process)
        for own, their in pairs:
            their.close()
            stack.enter_context(own)
        started = [Sibling(stack.enter_context(own.makefile("rw"))) for own, _their in pairs]
        assert [one.answer() for one in started] == ["ready"] * count
        yield started
    assert process.returncode == 0


def obey(work: Callable[[int, Any], Any]) -> None:
    """Fork a process for each file descriptor in the arguments. Each calls `work(number, order)` for every line.

    The process that forks them ends when all have ended.
    """
    descriptors = [int(each) for each in sys.argv[1].split(",")]
    gc.freeze()  # so that their garbage collectors do not write to the shared memory
    for number, descriptor in enumerate(descriptors):
        if os.fork():
            continue
        for other in descriptors:
            if other != descriptor:
                os.close(other)
        with socket.socket(fileno=descriptor) as connection, connection.makefile("rw") as lines:
            print(json.dumps("ready"), file=lines, flush=True)
            for line in lines:
                print(json.dumps(work(number, json.loads(line))), file=lines, flush=True)
        os._exit(0)  # A normal exit would copy the shared memory, page by page.
    for descriptor in descriptors:
        os.close(descriptor)
    statuses = [os.wait()[1] for _ in descriptors]
    os._exit(any(statuses))
