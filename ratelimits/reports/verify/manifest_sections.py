"""What a manifest lists of a month, section by section: reports, rows by their digests, deliveries, and the history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from django.db.models import Max, QuerySet, Sum

from ratelimits.models import (
    Adjustment,
    DurabilityGap,
    KeptPeriod,
    ProcessTotal,
    PushDelivery,
    PushedReport,
    QuarantinedBatch,
    Report,
    ReportLine,
)
from ratelimits.models.ledger import moment
from ratelimits.models.raw.adoption import MODELS, never_recorded
from ratelimits.reports.build import CHUNK, in_order
from ratelimits.reports.periods import SECOND, iso, starts_in
from ratelimits.reports.rows import report_id
from ratelimits.usage.retention.archive import day_of

_TOTALS = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
#: What is listed of a delivery: who was to get which event of which line, and what became of it.
_OF_DELIVERY = (
    *("line_id", "customer", "meter", "overage", "event", "happened_at", "state", "unsure_since", "settled_at"),
    "note",
)
_SETTLED = (PushDelivery.State.ACCEPTED, PushDelivery.State.ELSEWHERE)


class Table(NamedTuple):
    """Rows that a manifest has a digest of, each by the column that names it."""

    what: str
    name: str
    rows: Callable[[str, int, int], QuerySet[Any]]
    without: frozenset[str] = frozenset()

    def columns(self) -> list[str]:
        """Return the columns that the digests are made of."""
        fields = self.rows("default", 0, 0).model._meta.concrete_fields
        return [field.attname for field in fields if field.attname not in self.without]


#: The sections of digests of rows; the callable returns those of the month between two moments in µs.
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
        frozenset({"id", "version"}),  # a further edit within the same period leaves it as it is
    ),
}


def reports(using: str, month: str, start: int, end: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each report of the month by its name, with its digest and totals."""
    rows = Report.objects.using(using).filter(period_start__gte=start, period_start__lt=end)
    # Before their lines: those of a report that is finalised in between would be missing.
    found = list(rows.order_by("period_start", "account", "version").iterator(CHUNK))
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    sums = ReportLine.objects.using(using).filter(**within).values_list("report", "meter").order_by()
    totals: dict[int, dict[str, list[int]]] = {}
    for report, meter, *counts in sums.annotate(*(Sum(name) for name in _TOTALS)).iterator(CHUNK):
        totals.setdefault(report, {})[meter] = counts
    for each in found:
        if starts_in(month, each.period_start, each.timezone):
            yield (
                _name(each),
                {
                    "digest": each.digest,
                    "lines": each.line_count,
                    "signature": each.signature,
                    "finalised_at": each.finalised_at.isoformat(),
                    "totals": totals.get(each.pk, {}),
                    **({"amounts": each.amounts} if each.amounts else {}),
                },
            )


def _name(report: Report) -> str:
    return f"{report_id(report.account, report.period_start)} v{report.version}"


def deliveries(using: str, month: str, start: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield a digest of the deliveries of each report of the month, for each billing system."""
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    rows = PushDelivery.objects.using(using).filter(**within).order_by("report_id", "line_id")
    events = groupby(rows.values_list("report_id", "receiver_id", *_OF_DELIVERY).iterator(CHUNK), key=itemgetter(0))
    planned = PushedReport.objects.using(using).filter(**within).order_by("report_id").select_related("report")
    ahead = next(events, None)
    for pk, those in groupby(planned.iterator(CHUNK), key=lambda each: each.report_id):
        every = list(those)
        digests = {each.receiver_id: hashlib.sha256(_digest((each.lines, each.planned_at)).encode()) for each in every}
        # Those of a report, or for a receiver, for which nothing is planned, verifying the delivery ledger names.
        while ahead is not None and ahead[0] < pk:
            ahead = next(events, None)
        for _report, receiver, *values in ahead[1] if ahead is not None and ahead[0] == pk else ():
            if receiver in digests:
                digests[receiver].update(_digest(values).encode())
        report = every[0].report
        if starts_in(month, report.period_start, report.timezone):
            yield from (
                (f"{_name(report)} to {receiver}", digest.hexdigest()) for receiver, digest in sorted(digests.items())
            )


def unsettled(using: str, start: int, end: int) -> int:
    """Return how many deliveries of the month are neither accepted nor billed elsewhere."""
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    return PushDelivery.objects.using(using).filter(**within).exclude(state__in=_SETTLED).count()


def history(using: str, listed: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return a digest of the history of each kind of row of the configuration, up to its newest record.

    With `listed`, what a manifest has of this, up to the same record and of the same columns as there.
    """
    found = {}
    for model in MODELS:
        name = str(model._meta.model_name)
        records: Any = model.history.using(using)  # type: ignore[attr-defined]
        before = (listed or {}).get(name)
        if listed is not None and before is None:
            continue
        known = {field.attname for field in records.model._meta.concrete_fields}
        columns = sorted(known) if before is None else [each for each in before["columns"] if each in known]
        newest = (records.aggregate(newest=Max("pk"))["newest"] or 0) if before is None else before["newest"]
        digest = hashlib.sha256()
        for row in records.filter(pk__lte=newest).order_by("pk").values_list(*columns).iterator(CHUNK):
            digest.update(_digest(row).encode())
        found[name] = {"newest": newest, "columns": columns, "digest": digest.hexdigest()}
    return found


def without_history(using: str) -> dict[str, str]:
    """Return a digest of each row of the configuration that no record of the history tells of, by kind and number."""
    found = {}
    for model in MODELS:
        columns = [field.attname for field in model._meta.concrete_fields]
        rows = never_recorded(model, using).order_by("pk").values_list("pk", *columns)
        found.update({f"{model._meta.model_name} {pk}": _digest(values) for pk, *values in rows.iterator(CHUNK)})
    return found


def dated_back(using: str, listed: dict[str, Any], since: int) -> Iterator[str]:
    """Name the records that came after those of a manifest, and that say that they held before `since` (µs)."""
    for model in MODELS:
        records: Any = model.history.using(using)  # type: ignore[attr-defined]
        about = listed.get(str(model._meta.model_name))
        if about is not None:
            for record in records.filter(pk__gt=about["newest"], since__lt=since).order_by("pk"):
                yield f"{model._meta.verbose_name} {record.id} (record {record.pk})"


def _quarantined(using: str, start: int, end: int) -> QuerySet[Any]:
    """Those with usage of the month: of others some may come at any time. One that cannot be read may have any."""
    rows = QuarantinedBatch.objects.using(using)
    names = [pk for pk, fields in rows.values_list("pk", "fields").iterator(CHUNK) if _touches(fields, start, end)]
    return rows.filter(pk__in=names)


def _touches(fields: Any, start: int, end: int) -> bool:
    try:
        return int(fields["#o"]) < end and int(fields["#t"]) >= start
    except (KeyError, TypeError, ValueError):
        return True


def rows_of(rows: Any, name: str, columns: list[str]) -> dict[str, str]:
    """Return a digest of these columns of each row, by what names it."""
    found = rows.order_by("pk").values_list(name, *columns).iterator(CHUNK)
    return {str(called): _digest(values) for called, *values in found}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, default=_text, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"  # databases keep more or fewer zeros
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def process_totals(using: str, start: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield a digest for each kind and day, over processes: what is old is added up over them."""
    place = ("kind", "bin", "account", "key", "meter")
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    sums = rows.values_list(*place).order_by(*in_order(using, *place)).annotate(Sum("requests"), Sum("units"))
    digests: dict[tuple[str, int], Any] = {}
    for row in sums.iterator(CHUNK):
        digests.setdefault((row[0], day_of(row[1])), hashlib.sha256()).update(_digest(row).encode())
    for (kind, day), digest in digests.items():
        yield f"{kind} {iso(day * SECOND)}", digest.hexdigest()
