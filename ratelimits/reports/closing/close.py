"""Close billing periods: write reports for periods with complete usage, and new versions for later changes.

A report contains the ledger lines of its account up to a position in the chain of each shard of the account. It stores
these positions, so that it can be computed again.

Accounts of one shard are closed together, in one transaction that holds the lock of the shard's row. If one account
fails, the other accounts are closed without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import groupby, islice
from operator import or_
from time import time_ns
from typing import Any, NamedTuple

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import F, Q

from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard, shard_of
from ratelimits.models import Account, ChainMark, PeriodUsage, Report, ShardState
from ratelimits.models.ledger.sums import is_overflow
from ratelimits.models.periods import freeze
from ratelimits.progress import Progress
from ratelimits.reports.adjusting import unreported
from ratelimits.reports.closing.account import Closing
from ratelimits.reports.closing.closing_data import ClosingData
from ratelimits.reports.closing.late_gaps import LateGaps, Starts
from ratelimits.reports.closing.writing import ReportWriter
from ratelimits.reports.periods import SECOND
from ratelimits.signals import period_closed
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

_NO_STARTS: Starts = {}
#: Maximum number of accounts of a shard that are closed in one transaction. A drain of this shard waits for the
#: transaction.
MAX_TOGETHER = 100
#: Maximum number of conditions in one statement of `mark_as_reported`.
_MAX_CONDITIONS = 50


def finalise(now: int | None = None, *, account: str | None = None) -> list[Report]:
    """Close all periods that can be closed, as `finalise_each` does, and return the new reports."""
    return [report for closed in finalise_each(now, account=account) for report in closed.reports]


class ClosingResult(NamedTuple):
    """The result of closing some accounts: the new reports, and how many of all accounts are done so far."""

    reports: list[Report]
    done: int
    total: int


def finalise_each(
    now: int | None = None, *, account: str | None = None, progress: Progress | None = None
) -> Iterator[ClosingResult]:
    """Close every billing period that can be closed, and correct closed periods by new versions of their reports.

    A new version adds adjustments, and gaps and lost replies that became known later. With the setting LATE_USAGE
    "version" it also adds late usage. With "period", late usage usually goes into the report of a later period.

    A watermark is the moment before which all usage of a shard is in the ledger. A period can be closed once `now` and
    the watermarks of the account's shards have passed the period's end plus GRACE_SECONDS. `now` is µs since 1970 UTC,
    by default this machine's clock. If an account cannot be closed, this is logged, and other accounts are closed.
    Yield a result after each list of `in_chunks`, so that memory does not grow with the number of accounts. If nothing
    has changed since the first call, a second call writes no report. `progress` shows how many accounts are done.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    usage = PeriodUsage.objects.using(using)
    due = usage.filter(ended(now), covered=None)
    # `covered` is the position up to which reports contain the usage. `position` is the position of its newest batch.
    late = usage.filter(position__gt=F("covered"))
    adjusted = unreported(using)
    names = {name for rows in (due, late, adjusted) for name in rows.order_by().values_list("account", flat=True)}
    gaps = LateGaps(using)
    names |= gaps.starts.keys()
    chosen = names if account is None else names & {account}
    done, failed = 0, set[str]()
    if progress is not None:
        progress.begin("accounts", len(chosen), lambda: done)
    for chunk in in_chunks(chosen):
        reports = _close_each(using, chunk, now, gaps.starts, failed)
        done += len(chunk)
        yield ClosingResult(reports, done, len(chosen))
    gaps.forget(chosen - failed)


def ended(now: int) -> Q:
    """Return the condition for usage of periods that have ended at `now` (µs since 1970 UTC)."""
    return Q(period_end__lte=now // SECOND)


def home_shard(account: str) -> int:
    """Return the shard in which an account's usage is counted."""
    return account_shard(account, conf.SHARDS) if account else shard_of("anonymous", conf.SHARDS)


def in_chunks(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the accounts in lists of at most MAX_TOGETHER. All accounts of a list have the same home shard."""
    sorted_names = sorted((home_shard(name), name) for name in names)
    for _shard, group in groupby(sorted_names, key=lambda pair: pair[0]):
        while chunk := [name for _shard, name in islice(group, MAX_TOGETHER)]:
            yield chunk


def _close_each(using: str, names: list[str], now: int, with_new_gaps: Starts, failed: set[str]) -> list[Report]:
    """Close these accounts together. If that fails, close each half of them by itself.

    If a half fails too, halve it again, down to single accounts. Add each account that cannot be closed to `failed`.
    """
    try:
        return close_together(using, names, now, with_new_gaps)
    except Exception as error:
        if isinstance(error, OperationalError | InterfaceError) and not is_overflow(error):
            raise  # The database failed, so closing fewer accounts would not help.
        if len(names) > 1:
            half = len(names) // 2
            halves = (names[:half], names[half:])
            return [report for part in halves for report in _close_each(using, part, now, with_new_gaps, failed)]
        failed.add(names[0])
        logger.exception("Account %r cannot be closed; other accounts are closed", names[0])
        return []


def close_together(
    using: str,
    names: list[str],
    now: int,
    with_new_gaps: Starts = _NO_STARTS,
    *,
    only: Mapping[str, Collection[int]] | None = None,
    check: Callable[[list[Report]], None] | None = None,
) -> list[Report]:
    """Close all periods of these accounts that can be closed, in one transaction. If one account fails, close none.

    `with_new_gaps` has, for each account, the starts of closed periods for which a gap was declared or changed after
    the closing. `only` has the starts (µs since 1970 UTC) of open periods, by account. If it is given, close only these
    periods. `check` is called with the written reports before the commit. If `check` raises an error, nothing is
    written.
    """
    # Read the shards before the transaction: SQLite can refuse the writes of a transaction whose first statement was a
    # read.
    shards = shards_of(using, names)
    to_lock = shards_to_lock(using, shards)
    written: list[Report] = []
    with transaction.atomic(using=using, durable=True):
        locked = [ShardState.lock(using, shard) for shard in to_lock]
        freeze_adjusted(using, names)
        data = ClosingData(using, names, {state.shard: state for state in locked if state is not None})
        crash.reached("close:locked")  # Does nothing, but tests end the process at this step.
        writer = ReportWriter(using)
        for name in names:
            closing = Closing(data, name, shards[name], now, with_new_gaps.get(name, ()), writer)
            written += closing.close(None if only is None else only[name])
        writer.flush()
        mark_as_reported(using, written)
        crash.reached("close:marked")
        if check is not None:
            check(written)
    crash.reached("close:committed")
    for report in written:
        logger.info("report %s was finalised", report)
        period_closed.send_robust(Report, report=report)
    return written


def freeze_adjusted(using: str, names: Iterable[str]) -> None:
    """Freeze the billing periods of the accounts' adjustments that are not on a report yet.

    Saving an adjustment freezes its period. But raw SQL and bulk writes do not.
    """
    starts = unreported(using, account__in=list(names)).order_by().values_list("account", "period_start")
    if uses := {(account, int(start.timestamp())) for account, start in starts}:
        freeze(using, uses)


def shards_of(using: str, names: list[str]) -> dict[str, list[int]]:
    """Return the shards that have usage of each account, and the shard that counts the account's usage now."""
    by_account = {name: {home_shard(name)} for name in names}
    rows = PeriodUsage.objects.using(using).filter(account__in=names).order_by()
    for name, shard in rows.values_list("account", "shard").distinct():
        by_account[name].add(shard)
    return {name: sorted(shards) for name, shards in by_account.items()}


def shards_to_lock(using: str, shards: Mapping[str, list[int]]) -> list[int]:
    """Return the shards to lock for closing these accounts, sorted. `shards` has the shards of each account.

    An account whose identifier was edited has several names, perhaps in several shards. Its names share one allowance,
    so periods of two of these names must not be closed at the same time. Therefore return the shards of all names.
    """
    shards_of_accounts = {shard for group in shards.values() for shard in group}
    history: Any = Account.history
    ids = history.using(using).filter(identifier__in=list(shards)).values("id")
    others = history.using(using).filter(id__in=ids).exclude(identifier__in=list(shards)).order_by()
    other_names = others.values_list("identifier", flat=True).distinct()
    return sorted(shards_of_accounts.union(map(home_shard, other_names)))


def mark_as_reported(using: str, reports: list[Report]) -> None:
    """Store the positions up to which the reports contain usage: in the totals (PeriodUsage), and as marks.

    A mark is a row of ChainMark. Compaction does not join a batch before a mark with a batch after the mark.
    """
    mark_ends(using, [report.chain for report in reports])
    # Accounts are updated together if their reports have the same positions (`chain`) and the same periods (the keys of
    # `since`). So group the accounts: first by the positions, then by the starts of the periods.
    by_chain: dict[tuple[tuple[str, int], ...], dict[tuple[str, ...], list[str]]] = {}
    for report in reports:
        by_chain.setdefault(tuple(report.chain.items()), {}).setdefault(tuple(report.since), []).append(report.account)
    for chain, accounts in by_chain.items():
        usage = [Q(account__in=names, period__in=map(int, periods)) for periods, names in accounts.items()]
        # There are several statements, because databases limit the depth of a condition.
        for first in range(0, len(usage), _MAX_CONDITIONS):
            rows = PeriodUsage.objects.using(using).filter(reduce(or_, usage[first : first + _MAX_CONDITIONS]))
            for shard, position in chain:
                rows.filter(shard=int(shard)).update(covered=position)


def mark_ends(using: str, chains: Iterable[Mapping[str, int]]) -> None:
    """Write a mark for each position up to which a report contains usage."""
    ends = {(int(shard), position) for chain in chains for shard, position in chain.items()}
    marks = [ChainMark(shard=shard, position=position) for shard, position in sorted(ends)]
    ChainMark.objects.using(using).bulk_create(marks, batch_size=1000, ignore_conflicts=True)
