"""What the work with usage asks the floor of bills: nothing, until that floor installs its own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ratelimits.models import Customer


class Adjust(Protocol):
    """Adds units to what a customer owes for a billing period, or subtracts them, by adjustments.

    `start` is the start of the period, in µs since 1970 UTC.
    """

    def __call__(
        self, using: str, *, customer: int, account: str, start: int, meter: str, units: int, reason: str, author: Any
    ) -> None: ...


def _no_chains(_using: str) -> Iterator[Mapping[str, int]]:
    return iter(())


def _no_report(_using: str, _customer: Customer) -> int | None:
    return None


@dataclass(slots=True)
class Bills:
    """The functions of the floor of bills.

    included   takes the alias of a database, and returns a function that returns what a plan (its primary key) includes
               in each billing period, by meter; None if nobody knows what plans include
    chains     takes the alias of a database, and yields for each report the position up to which it contains usage, by
               shard
    reported_until  takes the alias of a database and a customer, and returns the end of its newest report,
               in s since 1970 UTC; None without a report
    adjust     see `Adjust`; None if there are no adjustments
    intervals  returns how many seconds after its last start Celery's beat starts a task of bills again, by its name
    """

    included: Callable[[str], Callable[[int], Mapping[str, int]]] | None = None
    chains: Callable[[str], Iterator[Mapping[str, int]]] = _no_chains
    reported_until: Callable[[str, Customer], int | None] = _no_report
    adjust: Adjust | None = None
    intervals: Callable[[], Mapping[str, float]] = dict


bills = Bills()
