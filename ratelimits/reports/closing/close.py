"""Closing: billing periods whose usage is complete become reports, and what comes later a further version of them.

A report covers its account's ledger lines up to a position in the digest chain of each shard, so that it can be made
again from them. Accounts of one shard are closed together, in one transaction under that shard's row lock; where one of
them fails the others are closed without it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import groupby, islice
from operator import or_
from time import time_ns
from typing import Any, NamedTuple

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import F, Q

from ratelimits.conf import conf
from ratelimits.engine.keys import shard_of
from ratelimits.models import Account, ChainMark, PeriodUsage, Report, ShardState
from ratelimits.reports.adjusting import unreported
from ratelimits.reports.closing.account import Closing
from ratelimits.reports.closing.account_periods import SHORTEST
from ratelimits.reports.closing.books import Books
from ratelimits.reports.closing.late_gaps import LateGaps, Starts
from ratelimits.reports.closing.writing import Writing
from ratelimits.reports.periods import SECOND
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

_NONE: Starts = {}
#: Accounts that are closed in one transaction at most: a drain of their shard waits meanwhile.
TOGETHER = 100
#: Accounts with different periods whose usage one statement marks as covered.
_MARKED = 50


def finalise(now: int | None = None, *, account: str | None = None) -> list[Report]:
    """Close what can be closed, as `finalise_each` does, and return the reports that were written."""
    return [report for closed in finalise_each(now, account=account) for report in closed.reports]


class Closed(NamedTuple):
    """Some accounts' closing: the reports that were written, and how many accounts are done, of how many."""

    reports: list[Report]
    done: int
    total: int


def finalise_each(now: int | None = None, *, account: str | None = None) -> Iterator[Closed]:
    """Close every billing period that can be closed, and correct closed ones by a new version.

    What is corrected is late usage, adjustments, and gaps and lost replies that became known since.

    A period is closed when the watermarks of its shards have passed its end plus GRACE_SECONDS, and `now` has too: µs
    since 1970 UTC, by default this machine's clock. An account that cannot be closed is logged, and keeps no other from
    being closed. Yield after each transaction, so that memory does not grow with the accounts. Doing it again changes
    nothing.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    usage = PeriodUsage.objects.using(using)
    due = usage.filter(ended(now), covered=None)
    late = usage.filter(position__gt=F("covered"))
    adjusted = unreported(using)
    names = {name for rows in (due, late, adjusted) for name in rows.order_by().values_list("account", flat=True)}
    gaps = LateGaps(using)
    names |= gaps.starts.keys()
    wanted = names if account is None else names & {account}
    done, failed = 0, set[str]()
    for chunk in in_chunks(wanted):
        reports = _close_each(using, chunk, now, gaps.starts, failed)
        done += len(chunk)
        yield Closed(reports, done, len(wanted))
    gaps.forget(wanted - failed)


def ended(now: int) -> Q:
    """Match usage of periods that ended before a moment (µs since 1970 UTC), or may have: not all say their ends."""
    return Q(period_end__lte=now // SECOND) | Q(period_end=None, period__lte=(now - SHORTEST) // SECOND)


def home_shard(account: str) -> int:
    """Return the shard that an account's usage is counted in."""
    return shard_of(f"account:{account}" if account else "anonymous", conf.SHARDS)


def in_chunks(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the accounts by shard, at most TOGETHER at once."""
    placed = sorted((home_shard(name), name) for name in names)
    for _shard, those in groupby(placed, key=lambda each: each[0]):
        while chunk := [name for _shard, name in islice(those, TOGETHER)]:
            yield chunk


def _close_each(using: str, names: list[str], now: int, gapped: Starts, failed: set[str]) -> list[Report]:
    """Close these accounts together, or, if that fails, the halves of them: one that cannot be closed ends up alone.

    Add that one to `failed`.
    """
    try:
        return close_together(using, names, now, gapped)
    except Exception as error:
        if isinstance(error, OperationalError | InterfaceError) and not _is_overflow(error):
            raise  # the database, not an account
        if len(names) > 1:
            half = len(names) // 2
            halves = (names[:half], names[half:])
            return [report for those in halves for report in _close_each(using, those, now, gapped, failed)]
        failed.add(names[0])
        logger.exception("Account %r cannot be closed; the other accounts are", names[0])
        return []


def _is_overflow(error: Exception) -> bool:
    """Return whether SQLite could not hold the sum of some rows. To PostgreSQL that is no OperationalError."""
    return "integer overflow" in str(error)


def close_together(using: str, names: list[str], now: int, gapped: Starts = _NONE) -> list[Report]:
    """Close these accounts in one transaction: all that can be closed of each, or, when one fails, nothing.

    `gapped` are the starts of the closed periods of each account that a gap touches which came after.
    """
    # Before the transaction, whose first statement is to lock: SQLite does not let a reader become a writer.
    shards = shards_of(using, names)
    beside = locked_with(using, shards)
    written: list[Report] = []
    with transaction.atomic(using=using, durable=True):
        locked = [ShardState.lock(using, shard) for shard in beside]
        books = Books(using, names, {state.shard: state for state in locked if state is not None})
        crash.reached("close:locked")
        writing = Writing(using)
        for name in names:
            written += Closing(books, name, shards[name], now, gapped.get(name, ()), writing).close()
        writing.flush()
        mark(using, written)
        crash.reached("close:marked")
    crash.reached("close:committed")
    for report in written:
        logger.info("report %s was finalised", report)
    return written


def shards_of(using: str, names: list[str]) -> dict[str, list[int]]:
    """Return the shards that have usage of each account, its home among them."""
    found = {name: {home_shard(name)} for name in names}
    rows = PeriodUsage.objects.using(using).filter(account__in=names).order_by()
    for name, shard in rows.values_list("account", "shard").distinct():
        found[name].add(shard)
    return {name: sorted(shards) for name, shards in found.items()}


def locked_with(using: str, shards: Mapping[str, list[int]]) -> list[int]:
    """Return the shards to lock for closing these accounts, in order: theirs, and those of their accounts' other names.

    Names of one account share an allowance, so no two of them are closed at once.
    """
    found = {shard for those in shards.values() for shard in those}
    history: Any = Account.history
    named = history.using(using).filter(identifier__in=list(shards)).values("id")
    others = history.using(using).filter(id__in=named).exclude(identifier__in=list(shards)).order_by()
    names = others.values_list("identifier", flat=True).distinct()
    return sorted(found.union(map(home_shard, names)))


def mark(using: str, reports: list[Report]) -> None:
    """Note what reports cover: compaction joins no batches across the ends, and their usage is not due again."""
    mark_ends(using, [report.chain for report in reports])
    alike: dict[tuple[tuple[str, int], ...], dict[tuple[str, ...], list[str]]] = {}
    for report in reports:
        alike.setdefault(tuple(report.chain.items()), {}).setdefault(tuple(report.since), []).append(report.account)
    for chain, accounts in alike.items():
        usage = [Q(account__in=names, period__in=map(int, periods)) for periods, names in accounts.items()]
        # Databases bound the depth of a condition.
        for first in range(0, len(usage), _MARKED):
            rows = PeriodUsage.objects.using(using).filter(reduce(or_, usage[first : first + _MARKED]))
            for shard, position in chain:
                rows.filter(shard=int(shard)).update(covered=position)


def mark_ends(using: str, chains: Iterable[Mapping[str, int]]) -> None:
    """Mark the positions up to which reports were made."""
    ends = {(int(shard), position) for chain in chains for shard, position in chain.items()}
    marks = [ChainMark(shard=shard, position=position) for shard, position in sorted(ends)]
    ChainMark.objects.using(using).bulk_create(marks, batch_size=1000, ignore_conflicts=True)
