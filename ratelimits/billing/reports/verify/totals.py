"""Verify the totals of usage: compare them with the ledger and with reports. Verify the positions at which reports end.

A report ends at a position of a shard's chain if it contains the usage of batches up to this position.

A total has the usage of an account in a billing period, for one meter, rule, shard and customer. A batch is *tallied*
when its lines were added to the totals. The *covered* position of a total is the position up to which reports contain
its usage.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from django.db import connections, transaction
from django.db.models import Count, F, Max

from ratelimits.algorithms.billing_periods import Period, Timeline
from ratelimits.billing.models import Report
from ratelimits.billing.reports.build import CHUNK, SUMS, between, in_order
from ratelimits.billing.reports.verify.report import has_readable_positions
from ratelimits.models import FrozenPeriod, Name
from ratelimits.models.customers import DatedName, customer_at
from ratelimits.models.periods import COLUMNS
from ratelimits.usage.models import ArchivedRange, ChainMark, Line, PeriodUsage, ShardState
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum
from ratelimits.usage.periods import SECOND, iso

#: The columns of lines that say to which total a line belongs.
_SUBJECT = ("account", "bin", "meter", "rule")
#: The columns of which a total has the sums. `shadow_requests` is a newer column: in older totals it is None.
_SUMMED = (*SUMS, "shadow_requests")
#: Maximum number of times that an account is read again. An account that changes while it is read can seem wrong.
_TRIES = 50


def verify_totals(using: str, *sources: str, checked: Counter[str] | None = None) -> Generator[str]:
    """Yield an error for each total that contradicts the ledger or the reports.

    `sources` are the aliases of the databases that contain the ledger's lines, by default `using`. All accounts are
    read as streams. If an account has a difference, it is read again, because perhaps a drain or a closing has changed
    it meanwhile. `checked` counts the totals and the ends of reports.
    """
    databases = sources or (using,)
    checked = Counter() if checked is None else checked
    yield from _verify_continuity(using)
    for account in _accounts(using, databases, {}):
        checked["totals"] += len(account.usage)
        try:
            findings = _confirmed(using, databases, account) if account.findings() else []
        except (ArithmeticError, ValueError, TypeError) as error:
            findings = [f"the totals of {account.name or 'anonymous'} cannot be verified: {error!r}"]
        yield from findings
    yield from _verify_marks(using, checked)


def _confirmed(using: str, sources: tuple[str, ...], account: _Account) -> list[str]:
    """Return the errors of an account. Read the account again until nothing changes it during the reading."""
    filters = {"account": account.name}
    for _try in range(_TRIES):
        with _at_one_moment(using):
            before = _state(using, account.name)
            findings = [error for read_again in _accounts(using, sources, filters) for error in read_again.findings()]
            if _state(using, account.name) == before:
                return findings
    payer = account.name or "anonymous"
    return [f"the totals of {payer} cannot be compared: in each of {_TRIES} tries they changed while they were read"]


@contextmanager
def _at_one_moment(using: str) -> Iterator[None]:
    """Let all queries in this context read the same state of the database.

    If a transaction is already open, do nothing.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        yield
        return
    with transaction.atomic(using=using):
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield


def _state(using: str, account: str) -> tuple[Any, ...]:
    """Return values that change whenever the account's names, its totals, its reports or its ledger lines change."""
    return (
        list(ShardState.objects.using(using).order_by("shard").values_list("shard", "tallied")),
        list(Name.objects.using(using).filter(identifier=account).order_by("since").values_list("since", "customer")),
        Report.objects.using(using).filter(customer__names__identifier=account).aggregate(Count("pk"), Max("pk")),
        ArchivedRange.objects.using(using).aggregate(Count("pk"), Max("pk")),
    )


def _accounts(using: str, sources: tuple[str, ...], filters: dict[str, Any]) -> Iterator[_Account]:
    """Yield each account that has usage or a report. `filters` selects accounts."""
    states = {str(state.shard): state.tallied for state in ShardState.objects.using(using)}
    archived = set(ArchivedRange.objects.using(using).order_by().values_list("shard", flat=True))
    sums = [_sums(source, states, filters) for source in sources]
    names = Name.objects.using(using).order_by(*in_order(using, "identifier"), "since")
    if filters:
        names = names.filter(identifier=filters["account"])
    usage = PeriodUsage.objects.using(using).filter(**filters).order_by(*in_order(using, "account"))
    # The reports of a customer are about all its texts.
    reports = Report.objects.using(using).annotate(text=F("customer__names__identifier")).filter(text__isnull=False)
    if filters:
        reports = reports.filter(text=filters["account"])
    reports = reports.select_related("customer").order_by(*in_order(using, "text"), "pk")
    periods = FrozenPeriod.objects.using(using).annotate(account=F("customer__names__identifier"))
    frozen = periods.filter(**filters, account__isnull=False).order_by(*in_order(using, "account"))
    # Each item has an account, a number and a row. The number says which method of `_Account` gets the row.
    streams: Iterator[tuple[str, int, Any]] = heapq.merge(
        ((row.identifier, 0, row) for row in names.iterator(CHUNK)),
        ((row[0], 1, row[1:]) for row in frozen.values_list("account", "customer", *COLUMNS).iterator(CHUNK)),
        *(((row["account"], 2, row) for row in source_sums) for source_sums in sums),
        ((row.account, 3, row) for row in usage.iterator(CHUNK)),
        ((row.text, 4, row) for row in reports.iterator(CHUNK)),
        key=lambda keyed: keyed[:2],
    )
    for name, rows in groupby(streams, key=lambda keyed: keyed[0]):
        account = _Account(using, name, states, archived if len(sources) == 1 else set())
        methods: tuple[Callable[[Any], None], ...] = (
            account.add_name,
            account.add_period,
            account.add_lines,
            account.add_usage,
            account.add_report,
        )
        for _name, number, row in rows:
            methods[number](row)
        yield account


def _sums(using: str, states: dict[str, int], filters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sums of the tallied ledger lines for each account, bin, meter, rule and shard.

    `newest` is the newest position of these lines.
    """
    lines = Line.objects.using(using).filter(between({}, states), **filters).values(*_SUBJECT, "batch__shard")
    rows: Iterator[dict[str, Any]] = (
        lines.order_by(*in_order(using, "account"))
        .annotate(**{name: ExactSum(name) for name in _SUMMED}, newest=Max("batch__first_position"))
        .iterator(CHUNK)
    )
    return rows


class _Account:
    """The ledger's sums, the totals and the reports of one account.

    `tallied` has, for each shard, the position of the last tallied batch. `archived` are the shards of which
    some lines were archived and are missing in the sources. This set is empty if there are several sources, because the
    archives are then among them.
    """

    def __init__(self, using: str, name: str, tallied: dict[str, int], archived: set[int]) -> None:
        self._using, self.name = using, name
        #: The customers that the account's text names, oldest first.
        self._names: list[DatedName] = []
        #: Where the next of these names must begin (s since 1970 UTC); None if no name must follow.
        self._next_name: int | None = 0
        self._names_follow = True
        self.usage: dict[tuple[Any, ...], PeriodUsage] = {}
        self._tallied, self._archived = tallied, archived
        #: For each total: the sums of its ledger lines, and the newest position with such lines.
        self._lines: dict[tuple[Any, ...], tuple[list[int], int]] = {}
        #: The frozen periods of each customer. (Their terms are not those of the customers: they are not used.)
        self._periods: dict[int, Timeline] = {}
        #: An error for the first bin with usage that no frozen period contains.
        self._outside: list[str] = []
        #: By customer, billing period (its start in s) and shard: the position up to which the newest report contains
        #: the usage.
        self._covered: dict[tuple[int, int, int], int] = {}

    def add_period(self, columns: tuple[Any, ...]) -> None:
        """Add a frozen period, from its customer and its columns."""
        customer, period = columns[0], Period(*columns[1:])
        timeline = self._periods.setdefault(customer, Timeline())
        if not timeline.is_frozen(period):  # The text has perhaps named the customer several times.
            timeline.freeze(period)

    def add_name(self, row: Name) -> None:
        """Add a name of a customer. Names must be added before lines, the oldest first."""
        self._names_follow &= row.since == self._next_name
        self._names.append(DatedName(row.since, row.customer_id))
        self._next_name = row.until

    def add_lines(self, row: dict[str, Any]) -> None:
        """Add the sums of some ledger lines (see `_sums`)."""
        customer = customer_at(self._names, row["bin"]) or 0
        period = self._periods[customer].frozen_at(row["bin"] * SECOND) if customer in self._periods else None
        if period is None:
            payer = self.name or "anonymous"
            self._outside = self._outside or [
                f"the ledger has usage of {payer} at {_when(row['bin'])}, which no row of the billing periods contains"
            ]
            return
        key = (period.start // SECOND, row["meter"], row["rule"], row["batch__shard"], customer)
        sums, newest = self._lines.get(key, ([0] * len(_SUMMED), 0))
        added = [count + row[name] for count, name in zip(sums, _SUMMED, strict=True)]
        self._lines[key] = added, max(newest, row["newest"])

    def add_usage(self, row: PeriodUsage) -> None:
        """Add a total."""
        self.usage[row.period, row.meter, row.rule, row.shard, row.customer_id] = row

    def add_report(self, report: Report) -> None:
        """Add a report of a customer. Reports must be added in the order in which they were finalised."""
        if not has_readable_positions(report):
            return  # verify/report.py reports the error.
        assert report.customer.pk is not None
        for period in report.since:
            for shard, position in report.chain.items():
                self._covered[report.customer.pk, int(period), int(shard)] = position

    def findings(self) -> list[str]:
        """Return a sentence for each error."""
        keys = sorted(self._lines.keys() | self.usage.keys())
        compared = (finding for key in keys for finding in self._compared(*key))
        return [
            *self._unclear_names(),
            *self._outside,
            *compared,
            *self._different_ends(),
        ]

    def _unclear_names(self) -> Iterator[str]:
        """Yield an error if the names do not follow each other, from 0 on, up to one without an end."""
        if self._names and not (self._names_follow and self._next_name is None):
            text = self.name or "anonymous"
            yield f"the names of {text} do not follow each other: nobody knows who has some of its usage"

    def _different_ends(self) -> Iterator[str]:
        """Yield an error for each total whose period is not frozen, or ends at another moment."""
        ends = {
            (customer, period.start // SECOND): period.end // SECOND
            for customer, timeline in self._periods.items()
            for period in timeline.frozen
        }
        for row in self.usage.values():
            if ends.get((row.customer_id, row.period)) != row.period_end:
                yield (
                    f"the total of {self.name or 'anonymous'} ({row.meter}) is about the billing period from"
                    f" {_when(row.period)} to {_when(row.period_end)}, which is not in the table of billing periods"
                )

    def _compared(self, period: int, meter: str, rule: int, shard: int, customer: int) -> Iterator[str]:
        """Yield the errors of one total: compare it with the ledger's lines and with the reports."""
        sums, newest = self._lines.get((period, meter, rule, shard, customer), ([0] * len(_SUMMED), 0))
        total = self.usage.get((period, meter, rule, shard, customer))
        payer = self.name or "anonymous"
        if len({names[-1] for names in self._lines.keys() | self.usage.keys()}) > 1:
            payer += f", customer {customer}"
        name = f"the total of {payer} ({meter}, rule {rule}) from {_when(period)} in shard {shard:02d}"
        if total is None:
            yield f"{name} is missing: the ledger has {dict(zip(_SUMMED, sums, strict=True))}"
            return
        # Usage is archived only after it is on a report. Its total has a covered position then.
        partly_archived = shard in self._archived and total.covered is not None
        counts = [getattr(total, column) for column in _SUMMED]
        for column, count, in_lines in zip(_SUMMED, counts, sums, strict=True):
            if count is None:
                continue
            if count == MAX_TOTAL <= in_lines:
                yield (
                    f"{name} is full: the ledger's lines say {in_lines} {column}, and a total cannot be above"
                    f" {MAX_TOTAL}. So its period is not closed"
                )
                continue
            if count < in_lines or (count > in_lines and not partly_archived):
                yield f"{name} says {count} {column}, but the ledger's lines say {in_lines}"
        covered = self._covered.get((customer, period, shard))
        # If all usage of a total is newer than the reports, the total has no covered position yet. This is no error.
        if total.covered != covered and not (total.covered is None and total.position > (covered or 0)):
            yield f"{name} says that reports contain it up to position {total.covered}, but the reports say {covered}"
        tallied = self._tallied.get(str(shard), 0)
        if total.position < newest:
            yield f"{name} ends at position {total.position}, but has usage of position {newest}"
        elif total.position > tallied:
            yield f"{name} ends at position {total.position}, but the shard is tallied only up to {tallied}"
        elif total.position > (covered or 0) >= newest:
            yield (
                f"{name} ends at position {total.position}, but the ledger has no usage of it after position"
                f" {covered or 0}, where its reports end"
            )


def _when(seconds: int) -> str:
    """Return a moment (s since 1970 UTC) as text, even if it is outside the calendar."""
    try:
        return iso(seconds * SECOND)
    except OverflowError:
        return f"{seconds} s"


def _verify_continuity(using: str) -> Iterator[str]:
    """Yield an error for each report that does not begin where the customer's report before it ends."""
    columns = ("customer", "account", "label", "period_start", "timezone", "version", "chain", "since")
    reports = Report.objects.using(using).order_by("customer_id", "pk").only(*columns).iterator(CHUNK)
    for _token, reports_of_customer in groupby(reports, key=lambda report: report.customer_id):
        # By billing period (its start in s, as text): the positions at which the last report ends.
        ends: dict[str, dict[str, int]] = {}
        for report in filter(has_readable_positions, reports_of_customer):
            for period, since in report.since.items():
                if since != ends.get(period, {}):
                    yield (
                        f"report {report} does not begin where the report before it ends (period of"
                        f" {_when(int(period))}): some usage is on no report, or on two"
                    )
                ends[period] = report.chain


def _verify_marks(using: str, checked: Counter[str]) -> Iterator[str]:
    """Compare the rows of `ChainMark` with the positions at which reports end."""
    marked_before = set(ChainMark.objects.using(using).values_list("shard", "position"))
    ends: set[tuple[int, int]] = set()
    for report in Report.objects.using(using).only("chain", "since").order_by().iterator(CHUNK):
        if has_readable_positions(report):
            ends.update((int(shard), position) for shard, position in report.chain.items())
    # Read the marks again. A report that was finalised meanwhile has added marks, and is perhaps not in `ends`.
    marked_after = set(ChainMark.objects.using(using).values_list("shard", "position"))
    checked["ends of reports"] += len(ends)
    for shard, position in sorted(ends - marked_before - marked_after):
        yield (
            f"position {position} of shard {shard:02d}, at which a report ends, is not marked, so compaction can join"
            " batches across it: in a database older than these marks, ratelimits_compact --mark adds them"
        )
    for shard, position in sorted((marked_before & marked_after) - ends):
        yield f"position {position} of shard {shard:02d} is marked as the end of a report, but no report ends there"
