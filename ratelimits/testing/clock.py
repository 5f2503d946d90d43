"""Stop the time of all decisions, and move it forward."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from django.test.utils import TestContextDecorator

from ratelimits import rules
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine.clock import clock
from ratelimits.quota import from_memory, without_decision
from ratelimits.testing import namespace

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class FrozenClock:
    """The stopped clock of all decisions. It moves only by `tick` and `move_to`, and by requests that wait."""

    @property
    def now(self) -> datetime:
        """Return the time of the next decision, in UTC."""
        return _EPOCH + timedelta(microseconds=clock.now())

    def tick(self, seconds: float | timedelta = 1) -> datetime:
        """Move the clock forward by a number of seconds or a timedelta, and return the new time.

        Raise ValueError if the number is negative, because the clock moves only forward.
        """
        delta = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
        if delta < timedelta(0):
            raise ValueError(f"the clock moves only forward, not by {delta.total_seconds():g} s")
        clock.advance(delta // timedelta(microseconds=1))
        return self.now

    def move_to(self, moment: datetime) -> datetime:
        """Move the clock forward to a moment, and return the moment. Raise ValueError for an earlier moment."""
        return self.tick(_aware(moment) - self.now)


class frozen_quota_clock(TestContextDecorator):  # noqa: N801  (it is used as a decorator)
    """Stop the time of all decisions, by default at the present moment. `with` gives the FrozenClock.

    The throttle classes, the middleware, the decorator and `check` use this time for decisions and headers. The
    time also decides which overrides, memberships, blocks and allows are valid. A request that has to wait moves the
    clock and does not sleep. A decorated function receives the clock in the argument with the name `kwarg_name`. A
    decorated class has the clock in the attribute with the name `attr_name`.

    All permits are unspent at the beginning. The tasks that write the ledger and the reports use the real time.
    """

    def __init__(
        self, at: datetime | None = None, *, attr_name: str | None = None, kwarg_name: str | None = None
    ) -> None:
        super().__init__(attr_name=attr_name, kwarg_name=kwarg_name)
        self._at = _aware(at) if at is not None else None
        #: For each use that has begun and not ended: the function that ends this use.
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> FrozenClock:  # type: ignore[override]  # django-stubs types this only for override_settings
        return self.enable()

    def enable(self) -> FrozenClock:
        leave = namespace.enter()
        previous = clock.frozen
        self._set(clock.now() if self._at is None else (self._at - _EPOCH) // timedelta(microseconds=1))

        def end() -> None:
            self._set(previous)
            leave()

        self._ends.append(end)
        return FrozenClock()

    def disable(self) -> None:
        self._ends.pop()()

    @staticmethod
    def _set(moment: int | None) -> None:
        """Stop the clock at a moment (µs since 1970 UTC). If `moment` is None, let the clock run.

        Forget the refusals in memory and the fallback's counts, because their times are times of the former clock.
        """
        clock.frozen = moment
        rules.use_clock(None if moment is None else clock.now)
        from_memory.denials.clear()
        from_memory.denials.clock = without_decision.local.clock = (
            time.monotonic if moment is None else lambda: clock.now() / MICROSECONDS
        )
        without_decision.local.clear()


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone: write for example datetime(2026, 11, 23, tzinfo=UTC)")
    return moment
