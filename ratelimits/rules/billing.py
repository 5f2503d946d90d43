"""Find the billing periods of an account around a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ratelimits.algorithms.billing_periods import Frozen, periods_around


class Billing(NamedTuple):
    """An account's billing periods.

    frozen      the newest frozen periods that the time zone and the anchor alone do not give
    boundaries  starts of the previous period, the current one and the next two, in µs since 1970 UTC
    """

    timezone: str
    anchor: str | None
    frozen: Frozen
    boundaries: tuple[int, int, int, int]


def billing_around(
    now: int, account: str | None, timezone: str, anchor: str | None, frozen: Frozen, log: Callable[[str], None]
) -> Billing:
    """Return the billing periods around `now` (µs since 1970 UTC).

    If the time zone or the anchor is not valid, call `log` with the reason and return calendar months in UTC. The
    periods `frozen` keep their starts and ends in each case.
    """
    try:
        return Billing(timezone, anchor, frozen, periods_around(timezone, anchor, frozen, now))
    except ValueError as error:
        log(f"The billing periods of {account!r} are not valid, so months in UTC are used: {error}")
        return Billing("UTC", None, frozen, periods_around("UTC", None, frozen, now))
