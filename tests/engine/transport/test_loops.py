"""Test event loops in many threads: each has its own connection, and they begin and end at the same time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ratelimits.engine.server import current_server

THREADS, TIMES = 8, 1500


@pytest.fixture
def hectic() -> Iterator[None]:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hectic")
def test_loops_begin_and_end_while_others_do() -> None:
    wire = current_server().wire

    async def begin_and_end() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(TIMES):
            await wire._open_shared(loop)
            await wire._loops[loop][1].aclose()

    with ThreadPoolExecutor(THREADS) as threads:
        for running in [threads.submit(asyncio.run, begin_and_end()) for _ in range(THREADS)]:
            running.result()
