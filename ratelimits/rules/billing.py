"""Find the billing periods of an account around a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ratelimits.algorithms.billing_periods import Span, periods_around


class Billing(NamedTuple):
    """An account's billing periods.

    kept        the period that kept its start and end after a change of time zone or anchor; None if there is no such
                period
    boundaries  starts of the previous period, the current one and the next two, in µs since 1970 UTC
    """

    timezone: str
    anchor: str | None
    kept: Span | None
    boundaries: tuple[int, int, int, int]


def billing_around(
    now: int, account: str | None, timezone: str, anchor: str | None, kept: Span | None, log: Callable[[str], None]
) -> Billing:
    """Return the billing periods around `now` (µs since 1970 UTC).

    If the time zone or the anchor is not valid, call `log` with the reason and return calendar months in UTC. The
    period `kept` keeps its start and its end in each case.
    """
    try:
        return Billing(timezone, anchor, kept, periods_around(timezone, anchor, kept, now))
    except ValueError as error:
        log(f"The billing periods of {account!r} are not valid, so months in UTC are used: {error}")
        return Billing("UTC", None, kept, periods_around("UTC", None, kept, now))
