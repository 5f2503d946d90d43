"""Close billing periods: write reports for periods with complete usage, and new versions for later changes.

A report contains the ledger lines of its customer up to a position in the chain of each shard of the customer. It
stores these positions, so that it can be computed again.

Customers of one shard are closed together, in one transaction that holds the locks of all their shards. If one customer
fails, the other customers are closed without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, islice
from operator import itemgetter
from time import time_ns
from typing import NamedTuple

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import F, Q

from ratelimits.billing.models import Report
from ratelimits.billing.reports.adjusting import start_of, unreported
from ratelimits.billing.reports.build import CHUNK
from ratelimits.billing.reports.closing.closing_data import ClosingData
from ratelimits.billing.reports.closing.customer import Closing
from ratelimits.billing.reports.closing.late_gaps import LateGaps, Starts
from ratelimits.billing.reports.closing.writing import ReportWriter
from ratelimits.billing.reports.terms import RuleBook
from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard, shard_of
from ratelimits.models.accounts.named import NamedCustomer, named, named_now
from ratelimits.models.periods import freeze_of_customers
from ratelimits.progress import Progress
from ratelimits.signals import period_closed
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.retention.compact import mark_ends
from ratelimits.usage.models import PeriodUsage, ShardState
from ratelimits.usage.models.sums import is_overflow
from ratelimits.usage.periods import SECOND

logger = logging.getLogger(__name__)

_NO_STARTS: Starts = {}
#: Maximum number of customers of a shard that are closed in one transaction. A drain of this shard waits for the
#: transaction.
MAX_TOGETHER = 100
#: Maximum number of customers whose names are read together.
_MAX_READ = 500


def finalise(now: int | None = None, *, account: str | None = None) -> list[Report]:
    """Close all periods that can be closed, as `finalise_each` does, and return the new reports."""
    return [report for closed in finalise_each(now, account=account) for report in closed.reports]


class ClosingResult(NamedTuple):
    """The result of closing some customers: the new reports, and how many of all customers are done so far."""

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
    the watermarks of the customer's shards have passed the period's end plus GRACE_SECONDS. `now` is µs since 1970 UTC,
    by default this machine's clock. With `account`, close only the customer whom this text names now. If a customer
    cannot be closed, this is logged, and other customers are closed. Yield a result after each list of `in_chunks`, so
    that memory does not grow with the number of customers. If nothing has changed since the first call, a second call
    writes no report. `progress` shows how many customers are done.
    """
    using = conf.DATABASE
    now = time_ns() // 1000 if now is None else now
    usage = PeriodUsage.objects.using(using)
    due = usage.filter(ended(now), covered=None)
    # `covered` is the position up to which reports contain the usage. `position` is the position of its newest batch.
    late = usage.filter(position__gt=F("covered"))
    adjusted = unreported(using)
    pks = {pk for rows in (due, late, adjusted) for pk in rows.order_by().values_list("customer", flat=True)}
    gaps = LateGaps(using)
    pks |= gaps.starts.keys()
    chosen = pks if account is None else pks & {named_now(using, [account])[account].pk}
    done, failed, rules = 0, set[int](), RuleBook(using)
    if progress is not None:
        progress.begin("customers", len(chosen), lambda: done)
    for chunk in in_chunks(using, chosen):
        reports = _close_each(using, chunk, now, gaps.starts, rules, failed)
        done += len(chunk)
        yield ClosingResult(reports, done, len(chosen))
    gaps.forget(chosen - failed)


def ended(now: int) -> Q:
    """Return the condition for usage of periods that have ended at `now` (µs since 1970 UTC)."""
    return Q(period_end__lte=now // SECOND)


def home_shard(account: str) -> int:
    """Return the shard in which an account's usage is counted."""
    return account_shard(account, conf.SHARDS) if account else shard_of("anonymous", conf.SHARDS)


def in_chunks(using: str, pks: Collection[int]) -> Iterator[list[int]]:
    """Yield the customers in lists of at most MAX_TOGETHER. The accounts of a list have the same home shard."""
    in_order = sorted(
        (home_shard(customer.account), customer.account, pk)
        for chunk in _read_together(pks)
        for customer in named(using, chunk)
        if (pk := customer.pk) is not None
    )
    for _shard, group in groupby(in_order, key=itemgetter(0)):
        while chunk := [pk for _shard, _account, pk in islice(group, MAX_TOGETHER)]:
            yield chunk


def _read_together(pks: Collection[int]) -> Iterator[list[int]]:
    in_order = sorted(pks)
    return (in_order[first : first + _MAX_READ] for first in range(0, len(in_order), _MAX_READ))


def in_account_order(using: str, pks: Collection[int], texts: Collection[str] = ()) -> Iterator[list[NamedCustomer]]:
    """Yield these customers, sorted by account and token, in lists that can be read together (see `named`)."""
    order = [customer[:3] for chunk in _read_together(pks) for customer in named(using, chunk)]
    order = sorted([*order, *(customer[:3] for customer in named(using, (), texts))])
    for first in range(0, len(order), _MAX_READ):
        chunk = order[first : first + _MAX_READ]
        saved = [pk for _account, _token, pk in chunk if pk is not None]
        yield named(using, saved, [text for text, _token, pk in chunk if pk is None])


def _close_each(
    using: str, pks: list[int], now: int, with_new_gaps: Starts, rules: RuleBook, failed: set[int]
) -> list[Report]:
    """Close these customers together. If that fails, close each half of them by itself.

    If a half fails too, halve it again, down to single customers. Add each customer that cannot be closed to `failed`.
    """
    try:
        return close_together(using, pks, now, with_new_gaps, rules=rules)
    except Exception as error:
        if isinstance(error, OperationalError | InterfaceError) and not is_overflow(error):
            raise  # The database failed, so closing fewer customers would not help.
        if len(pks) > 1:
            half = len(pks) // 2
            halves = (pks[:half], pks[half:])
            return [report for part in halves for report in _close_each(using, part, now, with_new_gaps, rules, failed)]
        failed.add(pks[0])
        log_failure(using, pks[0], error)
        return []


def log_failure(using: str, pk: int, error: Exception) -> None:
    """Log the error because of which a customer cannot be closed."""
    account = named(using, [pk])[0].account
    logger.error("Account %r cannot be closed; other accounts are closed", account, exc_info=error)


def close_together(
    using: str,
    pks: list[int],
    now: int,
    with_new_gaps: Starts = _NO_STARTS,
    *,
    only: Mapping[int, Collection[int]] | None = None,
    check: Callable[[list[Report]], None] | None = None,
    rules: RuleBook | None = None,
) -> list[Report]:
    """Close all periods of these customers that can be closed, in one transaction. If one customer fails, close none.

    Customers are named by their primary keys. `with_new_gaps` has, for each customer, the starts of closed periods for
    which a gap was declared or changed after the closing. `only` has the starts (µs since 1970 UTC) of open periods, by
    customer. If it is given, close only these periods. `check` is called with the written reports before the commit. If
    `check` raises an error, nothing is written. `rules` has the rules that an earlier call has read.
    """
    written: list[Report] = []
    with locked(using, pks, rules) as (data, shards):
        crash.reached("close:locked")  # Does nothing, but tests end the process at this step.
        writer = ReportWriter(using)
        for customer in data.customers:
            assert customer.pk is not None
            new_gaps = with_new_gaps.get(customer.pk, ())
            closing = Closing(data, customer, shards[customer.token], now, new_gaps, writer)
            written += closing.close(None if only is None else only[customer.pk])
        writer.flush()
        mark_as_reported(data, written)
        crash.reached("close:marked")
        if check is not None:
            check(written)
    crash.reached("close:committed")
    for report in written:
        logger.info("report %s was finalised", report)
        period_closed.send_robust(Report, report=report)
    return written


class Locked(NamedTuple):
    """The data of customers that can be closed, and the shards of each (by token), which are locked."""

    data: ClosingData
    shards: dict[str, list[int]]


@contextmanager
def locked(using: str, pks: Collection[int], rules: RuleBook | None = None) -> Iterator[Locked]:
    """Hold the locks of all shards of these customers in a transaction. All periods with adjustments are frozen.

    Without the locks, a drain could add usage, or a text could go to another customer, while the customers are closed.
    """
    # Read the shards before the transaction: SQLite can refuse the writes of a transaction whose first statement was a
    # read. Nearly always, the customers need no other shards than those that have their usage.
    usage = PeriodUsage.objects.using(using).filter(customer__pk__in=pks).order_by()
    to_lock = set(usage.values_list("shard", flat=True).distinct())
    while True:
        with transaction.atomic(using=using, durable=True):
            rows = [ShardState.lock(using, shard) for shard in sorted(to_lock)]
            customers = named(using, pks)
            shards = shards_of(using, customers)
            needed = {shard for one in shards.values() for shard in one}
            if needed <= to_lock:
                states = {state.shard: state for state in rows if state is not None}
                data = ClosingData(using, customers, states, rules)
                freeze_adjusted(data)
                yield Locked(data, shards)
                return
        # A text counts in a shard without usage of these customers, or got usage there meanwhile. Lock this shard too.
        to_lock |= needed


def freeze_adjusted(data: ClosingData) -> None:
    """Freeze the billing periods of the customers' adjustments that are not on a report yet.

    Saving an adjustment freezes its period. But raw SQL and bulk writes do not.
    """
    adjustments = (adjustment for customer in data.customers for adjustment in data.adjustments(customer))
    if uses := {(adjustment.customer_id, start_of(adjustment) // SECOND) for adjustment in adjustments}:
        freeze_of_customers(data.using, uses)


def shards_of(using: str, customers: Collection[NamedCustomer]) -> dict[str, list[int]]:
    """Return the shards that have usage of each customer, and the shards that count the usage of its texts."""
    by_token = {
        customer.token: {home_shard(text) for text in (customer.account, *(name.text for name in customer.names))}
        for customer in customers
    }
    tokens = {customer.pk: customer.token for customer in customers}
    rows = PeriodUsage.objects.using(using).filter(customer__pk__in=[pk for pk in tokens if pk is not None]).order_by()
    for pk, shard in rows.values_list("customer", "shard").distinct():
        by_token[tokens[pk]].add(shard)
    return {token: sorted(shards) for token, shards in by_token.items()}


def mark_as_reported(data: ClosingData, reports: list[Report]) -> None:
    """Store the positions up to which these new reports contain usage: in the totals, and as marks.

    A mark is a row of ChainMark. Compaction does not join a batch before a mark with a batch after the mark.
    """
    mark_ends(data.using, [report.chain for report in reports])
    # Name the totals by their primary keys. By customer and period, SQLite would read all totals of the period.
    reported: dict[int, set[int]] = {}
    for report in reports:
        for usage in data.usage_on(report):
            reported.setdefault(report.chain[str(usage.shard)], set()).add(usage.pk)
    for position, pks in reported.items():
        in_order = sorted(pks)
        for first in range(0, len(in_order), CHUNK):
            rows = PeriodUsage.objects.using(data.using).filter(pk__in=in_order[first : first + CHUNK])
            rows.update(covered=position)
