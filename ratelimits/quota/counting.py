"""What `quota` tells and asks the floor above, which counts usage.

This floor only limits. Without the floor above, each function here does nothing, and Redis counts no request. The floor
above puts functions of its own in their place, once, when Django starts (`usage/apps.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from ratelimits.engine.call import Call
    from ratelimits.engine.counting import RefusalCount
    from ratelimits.identity import Identity
    from ratelimits.quota.prepared import Prepared
    from ratelimits.rules import AccessRow, Snapshot

#: What is counted in the memory of a process. `usage/counting/process_totals.py` explains each kind.
Kind = Literal[
    "admitted", "unanswered", "unmetered", "unreported", "uncounted", "blocked", "exempt", "unreadable", "undecided"
]


def _nothing(*_arguments: object) -> None:
    """Do nothing."""


async def _anothing(*_arguments: object) -> None:
    """Do nothing, in async code."""


def _none(*_arguments: object) -> Sequence[Any]:
    """Return no items."""
    return ()


class Add(Protocol):
    """Counts requests of one kind that have the same account, key and costs.

    `bin_start` is the start of their bin, in seconds since 1970 UTC; None for the present bin.
    """

    def __call__(
        self,
        kind: Kind,
        account: str,
        key: str,
        costs: Mapping[str, int],
        requests: int = 1,
        bin_start: int | None = None,
        /,
    ) -> None: ...


@dataclass
class Counting:
    """The functions of the floor above.

    counts       whether Redis counts requests as usage. Only then can counts be restored from the ledger
    admitted     is told of each request that Redis admitted: its account ("account:7"), its costs, which nobody changes
                 later, and the moment (µs since 1970 UTC)
    add          counts other requests
    by_row       is told of each request that a block refused or an allow exempted: the row, the identity, the costs
    refusals     returns the counts of blocked requests that Redis must still add to the denied ones
    restore      raises the counts that Redis has perhaps lost to the usage of the ledger, before a request is decided.
                 Raises RulesUnavailable, NotSent or Unavailable
    arestore     does the same in async code
    record       is told of each request of an entry point, if RECORD_SAMPLE is not 0: its identity, scope, method,
                 costs, and whether it was refused
    forget       forgets what was counted and is not sent to Redis yet
    """

    counts: bool = False
    admitted: Callable[[str | None, Mapping[str, int], int], None] = _nothing
    add: Add = _nothing
    by_row: Callable[[AccessRow, Identity, tuple[tuple[str, int], ...]], None] = _nothing
    refusals: Callable[[], Sequence[RefusalCount]] = _none
    restore: Callable[[Call, Prepared, Identity, Snapshot], None] = _nothing
    arestore: Callable[[Call, Prepared, Identity, Snapshot], Awaitable[None]] = _anothing
    record: Callable[[Identity, str, str, Mapping[str, int], bool], None] = _nothing
    forget: Callable[[], None] = _nothing


counting = Counting()
