"""fixed_window and calendar_window: at most `capacity` per window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.reference.amounts import duration, whole
from tests.reference.limit import NO_HOPE, PASS, Limit, Verdict
from tests.reference.periods import Calendar


@dataclass(frozen=True, slots=True)
class Window:
    """The window that was charged last; None before the first charge."""

    start: int | None
    count: int


EMPTY = Window(None, 0)


class _Windowed(Limit):
    def __init__(self, data: dict[str, Any]) -> None:
        self.capacity = self.shown = whole(data, "capacity", 0)

    def span(self, state: Window, now: int) -> tuple[int, int]:
        """Return start and end of the window in which a charge at `now` counts."""
        raise NotImplementedError

    def count(self, state: Window, now: int) -> int:
        return state.count if state.start == self.span(state, now)[0] else 0

    def born(self, now: int) -> Window:
        return EMPTY

    def judge(self, state: Window, now: int, cost: int, patience: int | None) -> Verdict:
        if cost > self.capacity:
            return NO_HOPE
        if self.count(state, now) + cost <= self.capacity:
            return PASS
        return Verdict(self.span(state, now)[1] - now)

    def charged(self, state: Window, now: int, cost: int, lease: str) -> Window:
        return Window(self.span(state, now)[0], self.count(state, now) + cost)

    def refunded(self, state: Window, now: int, cost: int, lease: str) -> Window:
        return Window(state.start, state.count - min(cost, self.count(state, now)))

    def jumped(self, state: Window, newest: int, to: int) -> Window:
        return self.moved(state, newest, self, to)

    def handed_over(self, state: Window, now: int, new: _Windowed) -> Window:
        return self.moved(state, now, new, now)

    def moved(self, state: Window, now: int, new: _Windowed, to: int) -> Window:
        if state.start != self.span(state, now)[0]:
            return EMPTY
        return Window(new.span(EMPTY, to)[0], state.count)

    def remaining(self, state: Window, now: int) -> int:
        return max(0, self.capacity - self.count(state, now))

    def reset_after(self, state: Window, now: int) -> int:
        return self.span(state, now)[1] - now if self.count(state, now) else 0


class FixedWindow(_Windowed):
    algorithm = "fixed_window"

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.period = duration(data, "period")
        start = data.get("window_start") or "epoch"
        if start not in ("epoch", "first_hit"):
            raise ValueError(f"window_start must be epoch or first_hit, not {start!r}")
        self.first_hit = start == "first_hit"

    def span(self, state: Window, now: int) -> tuple[int, int]:
        start = now if self.first_hit else now - now % self.period
        if self.first_hit and state.start is not None and now < state.start + self.period:
            start = state.start
        return start, start + self.period

    def jumped(self, state: Window, newest: int, to: int) -> Window:
        if self.first_hit:
            return state if state.start is None else Window(state.start - (newest - to), state.count)
        return super().jumped(state, newest, to)

    def handed_over(self, state: Window, now: int, new: _Windowed) -> Window:
        assert isinstance(new, FixedWindow)
        if state.start is None or state.start != self.span(state, now)[0]:
            return EMPTY
        if not state.count and not (self.first_hit and new.first_hit and self.period == new.period):
            return EMPTY
        return Window(new.span(state, now)[0], state.count)

    def jumped_over(self, state: Window, newest: int, to: int, new: Any) -> Window:
        if self.first_hit or not new.first_hit or not self.count(state, newest):
            jumped: Window = super().jumped_over(state, newest, to, new)
            return jumped
        assert state.start is not None
        moved = Window(state.start - (newest - to), state.count)
        return Window(new.span(moved, to)[0], state.count)


class CalendarWindow(_Windowed):
    algorithm = "calendar_window"

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        unit = data.get("calendar_unit")
        # An account with these terms has months, as long as no usage of it is in a ledger.
        unit = "month" if unit == "billing_period" else unit
        self.calendar = Calendar(unit, data.get("timezone") or "UTC", data.get("anchor"))

    def span(self, state: Window, now: int) -> tuple[int, int]:
        return self.calendar.span(now)
