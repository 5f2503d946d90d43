"""What the work with usage asks the floor of bills: nothing, until that floor installs its own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


def _no_chains(_using: str) -> Iterator[Mapping[str, int]]:
    return iter(())


@dataclass(slots=True)
class Bills:
    """The functions of the floor of bills.

    included   takes the alias of a database, and returns a function that returns what a plan (its primary key) includes
               in each billing period, by meter; None if nobody knows what plans include
    chains     takes the alias of a database, and yields for each report the position up to which it contains usage, by
               shard
    intervals  returns how many seconds after its last start Celery's beat starts a task of bills again, by its name
    """

    included: Callable[[str], Callable[[int], Mapping[str, int]]] | None = None
    chains: Callable[[str], Iterator[Mapping[str, int]]] = _no_chains
    intervals: Callable[[], Mapping[str, float]] = dict


bills = Bills()
