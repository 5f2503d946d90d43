"""The sections of a month's manifest: reports, digests of rows, deliveries, and the history of the configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from django.db.models import Exists, F, Max, OuterRef, Q, QuerySet, Sum

from ratelimits.models import (
    Adjustment,
    ArchivedRange,
    DurabilityGap,
    KeptPeriod,
    Line,
    ProcessTotal,
    PushDelivery,
    PushedReport,
    QuarantinedBatch,
    Report,
    ReportLine,
)
from ratelimits.models.ledger import moment
from ratelimits.models.raw.adoption import MODELS, never_recorded, with_newest_record
from ratelimits.reports.build import CHUNK, in_order
from ratelimits.reports.periods import SECOND, iso, starts_in
from ratelimits.reports.rows import report_id
from ratelimits.usage.process_totals import FOLDED
from ratelimits.usage.retention.archive import day_of

_TOTALS = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
#: Columns of a delivery that manifests of format 3 digest: its line, customer and event, and its outcome.
OUTCOME = (
    *("line_id", "customer", "meter", "overage", "event", "happened_at", "state", "unsure_since", "settled_at"),
    "note",
)
#: Columns that say how a delivery is sent. Every attempt changes them.
_SENDING = ("attempts", "claim", "due_at", "together")
DELIVERY = (*OUTCOME, *_SENDING)
_SETTLED = (PushDelivery.State.ACCEPTED, PushDelivery.State.ELSEWHERE)


class Table(NamedTuple):
    """A table whose rows a manifest lists, each with a digest under the value of its column `name`."""

    what: str
    name: str
    rows: Callable[[str, int, int], QuerySet[Any]]
    without: frozenset[str] = frozenset()

    def columns(self) -> list[str]:
        """Return the columns that are digested."""
        fields = self.rows("default", 0, 0).model._meta.concrete_fields
        return [field.attname for field in fields if field.attname not in self.without]


#: The sections with digests of rows; the callable returns the rows of the month between two moments (µs).
TABLES = {
    "adjustments": Table(
        "adjustment",
        "reference",
        lambda using, start, end: Adjustment.objects.using(using).filter(
            period_start__gte=moment(start), period_start__lt=moment(end)
        ),
    ),
    "gaps": Table(
        "durability gap",
        "event",
        lambda using, start, end: DurabilityGap.objects.using(using).filter(since__lt=end, until__gte=start),
    ),
    "quarantined": Table("quarantined batch", "id", lambda using, start, end: _quarantined(using, start, end)),
    "kept_periods": Table(
        "kept billing period of",
        "account",
        lambda using, start, end: KeptPeriod.objects.using(using).filter(start__gte=start, start__lt=end),
        frozenset(
            {"id", "version"}
        ),  # A further edit in the same period changes only these (see manifest_conditional).
    ),
}


def reports(using: str, month: str, start: int, end: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each report of the month by its name, with its digest and totals."""
    rows = Report.objects.using(using).filter(period_start__gte=start, period_start__lt=end)
    # Read the reports before their lines, so that no report is listed without its lines.
    listed = list(rows.order_by("period_start", "account", "version").iterator(CHUNK))
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    sums = ReportLine.objects.using(using).filter(**within).values_list("report", "meter").order_by()
    totals: dict[int, dict[str, list[int]]] = {}
    for report, meter, *counts in sums.annotate(*(Sum(name) for name in _TOTALS)).iterator(CHUNK):
        totals.setdefault(report, {})[meter] = counts
    for row in listed:
        if starts_in(month, row.period_start, row.timezone):
            yield (
                _name(row),
                {
                    "digest": row.digest,
                    "lines": row.line_count,
                    "signature": row.signature,
                    "finalised_at": row.finalised_at.isoformat(),
                    "totals": totals.get(row.pk, {}),
                    **({"amounts": row.amounts} if row.amounts else {}),
                },
            )


def _name(report: Report) -> str:
    return f"{report_id(report.account, report.period_start)} v{report.version}"


def deliveries(
    using: str, month: str, start: int, end: int, columns: Sequence[str] = DELIVERY
) -> Iterator[tuple[str, str]]:
    """Yield a digest of the deliveries of each report of the month, for each billing system."""
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    rows = PushDelivery.objects.using(using).filter(**within).order_by("report_id", "line_id")
    events = groupby(rows.values_list("report_id", "receiver_id", *columns).iterator(CHUNK), key=itemgetter(0))
    planned = PushedReport.objects.using(using).filter(**within).order_by("report_id").select_related("report")
    ahead = next(events, None)
    for pk, group in groupby(planned.iterator(CHUNK), key=lambda pushed: pushed.report_id):
        marks = list(group)
        digests = {
            mark.receiver_id: hashlib.sha256(digest_of((mark.lines, mark.planned_at)).encode()) for mark in marks
        }
        # Skip deliveries whose report is not planned: push/verify.py names them.
        while ahead is not None and ahead[0] < pk:
            ahead = next(events, None)
        for _report, receiver, *values in ahead[1] if ahead is not None and ahead[0] == pk else ():
            if receiver in digests:
                digests[receiver].update(digest_of(_settled(columns, values)).encode())
        report = marks[0].report
        if starts_in(month, report.period_start, report.timezone):
            yield from (
                (f"{_name(report)} to {receiver}", digest.hexdigest()) for receiver, digest in sorted(digests.items())
            )


def _settled(columns: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """Return the values that do not change while the delivery keeps its state.

    A waiting delivery that was tried will be tried again, so the columns _SENDING are left out for it.
    """
    named = dict(zip(columns, values, strict=True))
    tried = named.get("state") == PushDelivery.State.WAITING and named.get("attempts")
    return [value for name, value in named.items() if not (tried and name in _SENDING)]


def unsettled(using: str, start: int, end: int) -> int:
    """Return the number of the month's deliveries that are neither accepted nor billed elsewhere."""
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    return PushDelivery.objects.using(using).filter(**within).exclude(state__in=_SETTLED).count()


def history(using: str, listed: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return a digest of the history of each model of the configuration, up to its newest record.

    With `listed`, which is this section of a manifest, use the newest records, the columns and the precision of times
    that it names. Times are cut to milliseconds, because fixtures (`dumpdata`) have no more digits.
    """
    section = {}
    for model in MODELS:
        name = str(model._meta.model_name)
        records: Any = model.history.using(using)  # type: ignore[attr-defined]
        before = (listed or {}).get(name)
        if listed is not None and before is None:
            continue
        known = {field.attname for field in records.model._meta.concrete_fields}
        columns = sorted(known) if before is None else [column for column in before["columns"] if column in known]
        newest = (records.aggregate(newest=Max("pk"))["newest"] or 0) if before is None else before["newest"]
        cut = {} if before is not None and "times" not in before else {"times": "milliseconds"}
        digest = hashlib.sha256()
        for row in records.filter(pk__lte=newest).order_by("pk").values_list(*columns).iterator(CHUNK):
            values = [_in_milliseconds(value) for value in row] if cut else row
            digest.update(digest_of(values).encode())
        section[name] = {"newest": newest, "columns": columns, "digest": digest.hexdigest(), **cut}
    return section


def _in_milliseconds(value: Any) -> Any:
    return value.replace(microsecond=value.microsecond // 1000 * 1000) if isinstance(value, datetime) else value


def without_history(using: str) -> dict[str, str]:
    """Return a digest of each row of the configuration that has no history record, by model and primary key."""
    digests = {}
    for model in MODELS:
        columns = [field.attname for field in model._meta.concrete_fields]
        rows = never_recorded(model, using).order_by("pk").values_list("pk", *columns)
        digests.update({f"{model._meta.model_name} {pk}": digest_of(values) for pk, *values in rows.iterator(CHUNK)})
    return digests


def newer_than_history(using: str, listed: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Return a digest of each row that is newer than its newest record, by model and primary key.

    The digest covers the row's version and start. Fixtures with their own history can make such rows. `listed` is the
    section `history` of a manifest; rows that were edited after the manifest are left out.
    """
    found = {}
    for model in MODELS:
        name = str(model._meta.model_name)
        if name not in listed:
            continue
        records: Any = model.history.using(using)  # type: ignore[attr-defined]
        newer = records.filter(id=OuterRef("pk"), pk__gt=listed[name]["newest"])
        rows = with_newest_record(model, using).filter(~Exists(newer)).order_by("pk")
        rows = rows.filter(Q(version__gt=F("recorded")) | Q(since__gt=F("recorded_since")))
        found.update({f"{name} {row.pk}": digest_of((row.version, row.since)) for row in rows.iterator(CHUNK)})
    return found


def dated_back(using: str, listed: dict[str, Any], since: int) -> Iterator[str]:
    """Yield the names of records that are newer than a manifest, but claim to be from before `since` (µs)."""
    for model in MODELS:
        records: Any = model.history.using(using)  # type: ignore[attr-defined]
        entry = listed.get(str(model._meta.model_name))
        if entry is not None:
            for record in records.filter(pk__gt=entry["newest"], since__lt=since).order_by("pk"):
                yield f"{model._meta.verbose_name} {record.id} (record {record.pk})"


def _quarantined(using: str, start: int, end: int) -> QuerySet[Any]:
    """Return the quarantined batches that may have usage of the month. An unreadable batch may have any usage."""
    rows = QuarantinedBatch.objects.using(using)
    names = [pk for pk, fields in rows.values_list("pk", "fields").iterator(CHUNK) if _touches(fields, start, end)]
    return rows.filter(pk__in=names)


def _touches(fields: Any, start: int, end: int) -> bool:
    try:
        return int(fields["#o"]) < end and int(fields["#t"]) >= start
    except (KeyError, TypeError, ValueError):
        return True


def rows_of(rows: Any, name: str, columns: list[str]) -> dict[str, str]:
    """Return a digest of these columns of each row, by the value of its column `name`."""
    named_values = rows.order_by("pk").values_list(name, *columns).iterator(CHUNK)
    return {str(row_name): digest_of(values) for row_name, *values in named_values}


def digest_of(values: Any) -> str:
    """Return the digest of values of a row. It is the same for each kind of database."""
    return hashlib.sha256(json.dumps(values, default=_text, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"  # Databases return different numbers of trailing zeros.
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def process_totals(using: str, start: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield a digest of the process totals for each kind and day. Sum them over all processes, as old totals are."""
    columns = ("kind", "bin", "account", "key", "meter")
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    sums = rows.values_list(*columns).order_by(*in_order(using, *columns)).annotate(Sum("requests"), Sum("units"))
    digests: dict[tuple[str, int], Any] = {}
    for row in sums.iterator(CHUNK):
        digests.setdefault((row[0], day_of(row[1])), hashlib.sha256()).update(digest_of(row).encode())
    for (kind, day), digest in digests.items():
        yield f"{kind} {iso(day * SECOND)}", digest.hexdigest()


def process_names(using: str, start: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield a digest of the process names of the totals, for each kind and day.

    Leave out kinds and days whose totals will still be summed over all processes.
    """
    columns = ("kind", "bin", "account", "key", "meter", "process")
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    unsummed: set[tuple[str, int]] = set()
    digests: dict[tuple[str, int], Any] = {}
    for row in rows.order_by(*in_order(using, *columns)).values_list(*columns).iterator(CHUNK):
        day = row[0], day_of(row[1])
        digests.setdefault(day, hashlib.sha256()).update(digest_of(row).encode())
        if row[0] in FOLDED and row[-1]:
            unsummed.add(day)
    for kind, start_of_day in digests.keys() - unsummed:
        yield f"{kind} {iso(start_of_day * SECOND)}", digests[kind, start_of_day].hexdigest()


def dropped(using: str, name: str) -> bool:
    """Return whether the totals of a kind and day were deleted because the ledger's lines of that day were archived.

    Restoring an archive brings back the lines, but not the totals.
    """
    kind, _space, day = name.partition(" ")
    start = int(datetime.fromisoformat(day).timestamp())
    ranges = ArchivedRange.all_ranges.using(using)
    restored = ranges.exclude(restored_at=None).filter(
        shard=OuterRef("batch__shard"),
        first_position__lte=OuterRef("batch__first_position"),
        last_position__gte=OuterRef("batch__first_position"),
    )
    lines = Line.objects.using(using).filter(bin__gte=start, bin__lt=start + 86_400)
    never_archived = lines.filter(~Exists(restored))
    return kind == "admitted" and ranges.exists() and not never_archived.exists()
