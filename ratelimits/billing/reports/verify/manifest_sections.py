"""Make the sections of a manifest about usage and bills: reports, deliveries, process totals, and digests of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from django.db.models import Exists, Model, OuterRef, QuerySet

from ratelimits.billing.models import Adjustment, PushDelivery, PushedReport, Report, ReportLine
from ratelimits.billing.reports.build import CHUNK
from ratelimits.billing.reports.closing.labelled import adjustments_of
from ratelimits.billing.reports.signing import name_of
from ratelimits.models import FrozenPeriod
from ratelimits.progress import Progress
from ratelimits.usage.ledger.process_totals import FOLDED
from ratelimits.usage.ledger.retention.archive import day_of
from ratelimits.usage.ledger.verify.row_digests import digest_of, digests_of_totals, names_of_processes, sums_of_totals
from ratelimits.usage.models import ArchivedRange, DurabilityGap, Line, ProcessTotal, QuarantinedBatch, erased
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.periods import SECOND, iso, month_window

#: Columns of report lines whose sums a manifest lists.
_TOTALS = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
#: Columns that say how a delivery is sent. Every attempt changes them.
_SENDING = ("attempts", "claim", "due_at", "together")
#: Columns of a delivery from which its digest is made. The salt of its report hides its customer.
DELIVERY = (
    *("report__salt", "line_id", "customer", "meter", "overage", "event", "happened_at", "state", "unsure_since"),
    *("settled_at", "note"),
    *_SENDING,
)
#: The states of deliveries that are never sent again: accepted, or billed in another way.
_SETTLED = (PushDelivery.State.ACCEPTED, PushDelivery.State.ELSEWHERE)


class Table(NamedTuple):
    """A database table whose rows have digests in a manifest, one digest for each row."""

    model: type[Model]
    #: The words with which messages name a row.
    entry_name: str
    #: The column whose value identifies a row in the manifest.
    name_column: str
    #: Takes the alias of a database, and a month like "2026-11". Returns the rows that belong to this month.
    rows: Callable[[str, str], QuerySet[Any]]


#: The tables of which a manifest has a digest for each row, by section.
TABLES = {
    "adjustments": Table(
        Adjustment,
        "adjustment",
        "reference",
        lambda using, month: Adjustment.objects.using(using).filter(pk__in=adjustments_of(using, month)),
    ),
    "gaps": Table(
        DurabilityGap,
        "durability gap",
        "id",
        lambda using, month: _gaps(using, *month_window(month)),
    ),
    "quarantined": Table(
        QuarantinedBatch,
        "quarantined batch",
        "id",
        lambda using, month: _quarantined(using, *month_window(month)),
    ),
    "periods": Table(
        FrozenPeriod,
        "the row of a billing period,",
        "id",
        lambda using, month: FrozenPeriod.objects.using(using).filter(label=month),
    ),
}


def counted(progress: Progress | None, what: str, rows: QuerySet[Any]) -> Iterator[Any]:
    """Yield the rows. If `progress` is given, it shows how many were read."""
    found = rows.iterator(CHUNK)
    return found if progress is None else progress.counted(what, found, rows.count())


def _gaps(using: str, start: int, end: int) -> QuerySet[Any]:
    """Return the gaps that overlap a span of time (µs since 1970 UTC)."""
    return DurabilityGap.objects.using(using).filter(since__lt=end, until__gte=start)


def reports(using: str, month: str, progress: Progress | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each report of the month, with the report's digest and totals."""
    rows = Report.objects.using(using).filter(label=month)
    # Read the reports before their lines, so that no report is listed without its lines.
    listed = list(rows.order_by("period_start", "account", "version").iterator(CHUNK))
    sums = ReportLine.objects.using(using).filter(report__label=month).values_list("report", "meter").order_by()
    totals: dict[int, dict[str, list[int]]] = {}
    for report, meter, *counts in counted(
        progress, "totals of reports", sums.annotate(*(ExactSum(name) for name in _TOTALS))
    ):
        totals.setdefault(report, {})[meter] = counts
    for row in listed:
        yield (
            name_of(row),
            {
                "digest": row.digest,
                "lines": row.line_count,
                "signature": row.signature,
                "finalised_at": row.finalised_at.isoformat(),
                "totals": totals.get(row.pk, {}),
                **({"amounts": row.amounts} if row.amounts else {}),
            },
        )


def deliveries(
    using: str,
    month: str,
    columns: Sequence[str] = DELIVERY,
    progress: Progress | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield a digest of the deliveries for each report of the month and each billing system."""
    rows = PushDelivery.objects.using(using).filter(report__label=month).order_by("report_id", "line_id")
    values_of_rows = counted(progress, "deliveries", rows.values_list("report_id", "receiver_id", *columns))
    groups = groupby(values_of_rows, key=itemgetter(0))
    planned = PushedReport.objects.using(using).filter(report__label=month)
    planned = planned.order_by("report_id").select_related("report")
    next_group = next(groups, None)
    for pk, group in groupby(planned.iterator(CHUNK), key=lambda pushed: pushed.report_id):
        pushed_reports = list(group)
        digests = {pushed.receiver_id: [digest_of((pushed.lines, pushed.planned_at))] for pushed in pushed_reports}
        # Both iterators are in the order of the reports. Go on to the deliveries of this report. Skip deliveries of a
        # report without a row in `PushedReport`: push/verify.py names them.
        deliveries: Iterable[Any] = ()
        while next_group is not None:
            report_pk, deliveries_of_report = next_group
            if report_pk == pk:
                deliveries = deliveries_of_report
            if report_pk >= pk:
                break
            next_group = next(groups, None)
        for _report, receiver, *values in deliveries:
            if receiver in digests:
                digests[receiver].append(delivery_digest(columns, values))
        name = name_of(pushed_reports[0].report)
        for receiver, of_rows in sorted(digests.items()):
            joined = "".join(erased.first_digests(using, of_rows))
            yield f"{name} to {receiver}", hashlib.sha256(joined.encode()).hexdigest()


def delivery_digest(columns: Sequence[str], values: Sequence[Any]) -> str:
    """Return the digest of a delivery. Leave out the columns `_SENDING` if it waits and was tried before.

    Each further attempt changes these columns, but not the state. The columns of a delivery that was not tried yet are
    not left out: they show that nothing was sent.
    """
    by_column = dict(zip(columns, values, strict=True))
    awaits_next_attempt = by_column.get("state") == PushDelivery.State.WAITING and by_column.get("attempts")
    return digest_of([value for column, value in by_column.items() if not (awaits_next_attempt and column in _SENDING)])


def unsettled(using: str, month: str) -> int:
    """Return how many of the month's deliveries are neither accepted nor billed in another way."""
    rows = PushDelivery.objects.using(using).filter(report__label=month)
    return rows.exclude(state__in=_SETTLED).count()


def _quarantined(using: str, start: int, end: int) -> QuerySet[Any]:
    """Return the quarantined batches that perhaps have usage of the month."""
    rows = QuarantinedBatch.objects.using(using)
    pks = [pk for pk, fields in rows.values_list("pk", "fields").iterator(CHUNK) if _may_overlap(fields, start, end)]
    return rows.filter(pk__in=pks)


def _may_overlap(fields: Any, start: int, end: int) -> bool:
    """Return whether a batch overlaps a span of time. A batch that cannot be read can have usage of any time.

    `fields` are the fields of the batch's hash. The field "#o" is the moment at which the batch was opened, and "#t" is
    the moment at which it was sealed (µs since 1970 UTC).
    """
    try:
        opened_at, sealed_at = int(fields["#o"]), int(fields["#t"])
        return opened_at < end and sealed_at >= start
    except (KeyError, TypeError, ValueError):
        return True


def process_totals(using: str, start: int, end: int, progress: Progress | None = None) -> Iterator[tuple[str, str]]:
    """Yield a digest of the process totals for each kind and day.

    The totals are first summed over all processes, because old totals are stored only as such sums.
    """
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    digests: dict[tuple[str, int], Any] = {}
    for (kind, start_of_bin), of_bin in _by_bin(counted(progress, "process totals", sums_of_totals(rows))):
        digest = digests.setdefault((kind, day_of(start_of_bin)), hashlib.sha256())
        digest.update("".join(_sorted_digests(using, of_bin)).encode())
    for (kind, day), digest in digests.items():
        yield f"{kind} {iso(day * SECOND)}", digest.hexdigest()


def _by_bin(rows: Iterable[Any]) -> Iterator[tuple[tuple[str, int], list[Any]]]:
    return ((kind_and_bin, list(of_bin)) for kind_and_bin, of_bin in groupby(rows, key=itemgetter(0, 1)))


def _sorted_digests(using: str, rows: Sequence[Any]) -> list[str]:
    """Return the digests of totals of one bin, as they were before an erasure, in an order that no erasure changes."""
    return sorted(erased.first_digests(using, digests_of_totals(using, rows)))


def process_names(using: str, start: int, end: int, progress: Progress | None = None) -> Iterator[tuple[str, str]]:
    """Yield a digest of the process totals for each kind and day, with their process names but without their counts.

    Leave out a kind and day if its totals will later be summed over all processes. The sums have no process names.
    """
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    unsummed: set[tuple[str, int]] = set()
    digests: dict[tuple[str, int], Any] = {}
    for (kind, start_of_bin), of_bin in _by_bin(counted(progress, "process names", names_of_processes(rows))):
        kind_and_day = kind, day_of(start_of_bin)
        digest = digests.setdefault(kind_and_day, hashlib.sha256())
        digest.update("".join(_sorted_digests(using, of_bin)).encode())
        if kind in FOLDED and any(row[-1] for row in of_bin):  # Only totals of these kinds are summed over processes.
            unsummed.add(kind_and_day)
    for kind, start_of_day in digests.keys() - unsummed:
        yield f"{kind} {iso(start_of_day * SECOND)}", digests[kind, start_of_day].hexdigest()


def was_dropped(using: str, name: str) -> bool:
    """Return whether the totals of a kind and day were deleted because the ledger's lines of that day were archived.

    This is so if the ledger has no line of that day that was never archived. (Restoring an archive brings back the
    lines, but not the totals.)
    """
    kind, _space, day = name.partition(" ")
    if kind != "admitted":  # Totals of other kinds are not deleted when lines are archived.
        return False
    start = int(datetime.fromisoformat(day).timestamp())
    ranges = ArchivedRange.all_ranges.using(using)
    restored = ranges.exclude(restored_at=None).filter(
        shard=OuterRef("batch__shard"),
        first_position__lte=OuterRef("batch__first_position"),
        last_position__gte=OuterRef("batch__first_position"),
    )
    lines = Line.objects.using(using).filter(bin__gte=start, bin__lt=start + 86_400)
    never_archived = lines.filter(~Exists(restored))
    return ranges.exists() and not never_archived.exists()
