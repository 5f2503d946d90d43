"""The clock by which this process estimates the server's time. Tests can stop it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ratelimits.algorithms.base import MICROSECONDS


class Clock:
    """This machine's clock, corrected by the times that the server reports. Moments are in µs since 1970 UTC."""

    def __init__(self) -> None:
        #: The server's time minus this machine's time, in µs.
        self.difference = 0
        #: The moment that the stopped clock shows. All decisions are made at this moment. None while the clock runs.
        self.frozen: int | None = None

    def now(self) -> int:
        """Return an estimate of the server's time."""
        if self.frozen is not None:
            return self.frozen
        return time.time_ns() // 1000 + self.difference

    def correct(self, server_time: int) -> None:
        """Set the clock to a time that the server has just reported (µs). Do nothing if the clock is stopped."""
        if self.frozen is None:
            self.difference = server_time - time.time_ns() // 1000

    def seconds(self) -> Callable[[], float]:
        """Return a function that returns seconds: this machine's monotonic clock, or this clock if it is stopped."""
        return time.monotonic if self.frozen is None else lambda: self.now() / MICROSECONDS

    def advance(self, microseconds: int) -> None:
        """Move the clock forward. The clock must be stopped."""
        assert self.frozen is not None
        self.frozen += microseconds

    def sleep(self, seconds: float) -> None:
        """Wait. If the clock is stopped, move it forward instead."""
        if self.frozen is None:
            time.sleep(seconds)
        else:
            self.advance(round(seconds * MICROSECONDS))

    async def asleep(self, seconds: float) -> None:
        """Do the same as `sleep`, in async code."""
        if self.frozen is None:
            await asyncio.sleep(seconds)
        else:
            self.advance(round(seconds * MICROSECONDS))


clock = Clock()
