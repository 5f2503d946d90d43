"""Billing periods that are over and have no report: why each is still open, and closing one in spite of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from time import time_ns

from django.db import transaction

from ratelimits.conf import conf
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import DurabilityGap, GapKind, PeriodUsage, Report, ShardState
from ratelimits.reports.adjusting import start_of, unreported
from ratelimits.reports.books import Books
from ratelimits.reports.close import in_chunks, mark, shards_of
from ratelimits.reports.closing import SHORTEST, Closing
from ratelimits.reports.periods import SECOND, Period, iso


class NotForcedError(ValueError):
    """A period cannot be closed, whatever may be missing; the message says why."""


@dataclass(frozen=True, slots=True)
class OpenPeriod:
    """A period of an account that starts at `start` (µs since 1970 UTC) and has no report.

    period  None where the account's terms cannot be read
    over    whether it has ended, and its grace too, by this machine's clock
    why     what it waits for, as a sentence
    units   billable units by meter so far, with what was adjusted
    """

    account: str
    start: int
    period: Period | None
    over: bool
    why: str
    units: dict[str, int]


def open_periods(now: int | None = None, *, account: str | None = None) -> Iterator[OpenPeriod]:
    """Yield the periods that may have ended and have no report, by shard and account; of one account, or of all.

    `now` is µs since 1970 UTC, by default this machine's clock.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    usage = PeriodUsage.objects.using(using).filter(covered=None, period__lte=(now - SHORTEST) // SECOND)
    names = {name for rows in (usage, unreported(using)) for name in rows.order_by().values_list("account", flat=True)}
    for chunk in in_chunks(names if account is None else names & {account}):
        shards = shards_of(using, chunk)
        states = ShardState.objects.using(using).in_bulk({each for those in shards.values() for each in those})
        books = Books(using, chunk, states)
        for name in chunk:
            closing = Closing(books, name, shards[name], now)
            for start in closing.open_starts():
                if start <= now - SHORTEST:
                    yield _described(closing, start, now, _units(books, name, start))


def _units(books: Books, account: str, start: int) -> dict[str, int]:
    units: Counter[str] = Counter()
    for row in books.usage(account):
        if row.period * SECOND == start:
            units[row.meter] += row.admitted_units - row.refunded_units
    for adjustment in books.adjustments(account):
        if start_of(adjustment) == start:
            units[adjustment.meter] += adjustment.quantity
    return dict(sorted(units.items()))


def _described(closing: Closing, start: int, now: int, units: dict[str, int]) -> OpenPeriod:
    try:
        period, _terms = closing.period(start)
    except ValueError as error:
        return OpenPeriod(closing.account, start, None, True, f"{error}: correct the account", units)
    over = now >= period.end + conf.GRACE_SECONDS * SECOND
    return OpenPeriod(closing.account, start, period, over, closing.why(period), units)


def force(account: str, start: int, by: str, reason: str, now: int | None = None) -> Report:
    """Close a period with what the ledger has of it, and declare on its report that usage may be missing.

    `start` is µs since 1970 UTC; `by` names the person. What comes later is late usage, as after any closing. Raises
    NotForcedError for a period that is not over, has a report, or has nothing to report, and without a reason.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    if not reason.strip():
        raise NotForcedError("say why: the reason stands in the declared gap")
    shards = shards_of(using, [account])
    with transaction.atomic(using=using, durable=True):
        locked = [ShardState.lock(using, shard) for shard in shards[account]]
        states = {state.shard: state for state in locked if state is not None}
        closing = Closing(Books(using, [account], states), account, shards[account], now)
        if start not in closing.open_starts():
            raise NotForcedError(f"{account or 'anonymous'} has no open period that starts at {iso(start)}")
        period = _forcible(closing, start, now)
        why = closing.why(period)
        DurabilityGap.objects.using(using).create(
            event=f"{GapKind.FORCED}:{sha256(f'{account}:{start}'.encode()).hexdigest()}",
            kind=GapKind.FORCED,
            account=account or ANONYMOUS,
            since=period.start,
            until=period.end - 1,
            detail=f"{by}: {reason} ({why})",
        )
        # The gap is on the report: the books are read once more, with it.
        closing = Closing(Books(using, [account], states), account, shards[account], now)
        report = closing.close_one(start)
        mark(using, [report])
    return report


def _forcible(closing: Closing, start: int, now: int) -> Period:
    try:
        period, _terms = closing.period(start)
    except ValueError as error:
        raise NotForcedError(f"{error}: correct the account first") from error
    if now < period.end:
        raise NotForcedError(f"the period ends at {iso(period.end)}: nobody can bill it before")
    return period
