"""Functions that tamper with the tables of the ledger and the reports, each in another way.

tampering_beside.py tampers with pushed rows and with the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from functools import reduce
from typing import Any

from django.db import models

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports import signing
from ratelimits.billing.reports.statements import version_rows
from ratelimits.moments import moment
from ratelimits.usage.ledger.packet import canonical, chained, checksum, content_digest, header_of
from ratelimits.usage.models import (
    ArchivedRange,
    Batch,
    ChainMark,
    DurabilityGap,
    ErasedDigest,
    Line,
    PeriodUsage,
    ProcessTotal,
    QuarantinedBatch,
    ShardState,
)
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT
from tests.support.reports.invoices import spend
from tests.support.usage.traffic import at

Model = type[models.Model]
Damage = Callable[[], object]


class NotApplicableError(Exception):
    """Raised if no two rows differ in a column, so there is nothing to exchange."""


#: The tables, and for each the columns that identify a row.
TABLES: dict[Model, frozenset[str]] = {
    Batch: frozenset({"id"}),
    Line: frozenset({"id"}),
    ShardState: frozenset({"shard"}),
    PeriodUsage: frozenset({"id"}),
    Report: frozenset({"id"}),
    ReportLine: frozenset({"id"}),
    Adjustment: frozenset({"id"}),
    DurabilityGap: frozenset({"id"}),
    ProcessTotal: frozenset({"id"}),
    ChainMark: frozenset({"id"}),
    QuarantinedBatch: frozenset({"id"}),
    ArchivedRange: frozenset({"id"}),
    ErasedDigest: frozenset({"id"}),
}
#: Unique columns, in which an inserted row needs other values. Tables that are not listed use _UNIQUE.
UNIQUE: dict[Model, tuple[str, ...]] = {}
_UNIQUE = ("event", "reference", "process", "name", "archive", "after")
_OCTOBER = at("2026-10-01") // 10**6
_IN_OCTOBER = {"bin__gte": _OCTOBER, "bin__lt": at("2026-11-01") // 10**6}
#: Which row is changed: the newest one of a closed period, if the table has one.
_TOUCHED: dict[Model, dict[str, Any]] = {
    Batch: {"position__gt": 1, "parts": b""},
    Line: _IN_OCTOBER,
    ShardState: {"position__gt": 1},
    PeriodUsage: {"period": _OCTOBER},
    ReportLine: {"charge_category": "usage"},
    Adjustment: {"report__isnull": False},
}


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, Decimal):
        return value + 1
    if isinstance(value, str):
        return ("1" if value[:1] == "0" else "0") + value[1:] if len(value) in (32, 64) else f"{value}x"
    if isinstance(value, list):
        return [*value, "x"]
    if isinstance(value, dict):
        return {**value, "7": 7}
    if isinstance(value, bytes | memoryview):
        return bytes(value) + b"\1" * 32
    return value + timedelta(days=1) if hasattr(value, "tzinfo") else type(value)(int=value.int ^ 1)


def rows(model: Model) -> Any:
    # Do not use the model's manager: a write to the configuration through the manager is an edit.
    return models.QuerySet(model).order_by("pk")


def write(row: Any) -> None:
    """Insert a row without the other effects of saving it."""
    models.QuerySet(type(row)).bulk_create([row])


def touched(model: Model) -> Any:
    found = rows(model).filter(**_TOUCHED.get(model, {})).last()
    assert found is not None, model
    return found


def change(model: Model, column: str) -> Damage:
    def damage() -> None:
        row = touched(model)
        value = getattr(row, column)
        if value is None and isinstance(model._meta.get_field(column), models.DateTimeField):
            value = moment(at("2026-11-07"))
        wanted = other(value)
        if (model, column) == (PeriodUsage, "position"):
            wanted = row.covered + 1  # The row then claims that there is late usage. A smaller value claims nothing.
        if column == "report_id":
            wanted = Report.objects.exclude(pk=value).values_list("pk", flat=True)[0]
        rows(model).filter(pk=row.pk).update(**{column: wanted})

    return damage


def swap(model: Model, column: str) -> Damage:
    def damage() -> None:
        one = touched(model)
        first = getattr(one, column)
        others = [name for name in _columns(model) if name != column]
        # The rows must differ in another column too: else the exchange would only swap two equal rows.
        two = next(
            (
                row
                for row in rows(model).exclude(pk=one.pk)
                if getattr(row, column) != first and any(getattr(row, name) != getattr(one, name) for name in others)
            ),
            None,
        )
        if two is None:
            raise NotApplicableError
        second, free = getattr(two, column), other(other(first))
        # Use a value that no row has in between, because the column may be unique.
        for pk, value in (
            (two.pk, free if isinstance(first, int | str) else second),
            (one.pk, second),
            (two.pk, first),
        ):
            rows(model).filter(pk=pk).update(**{column: value})

    return damage


def insert(model: Model) -> Damage:
    def damage() -> None:
        row = touched(model)
        row.pk = 999 if model is ShardState else row.pk + 1000 if model is Line else None
        if model not in (ShardState, PeriodUsage, Line):
            for column in ("seq", "number", "version", "position"):
                if hasattr(row, column) and model not in UNIQUE:
                    setattr(row, column, getattr(row, column) + 1)
        for column in UNIQUE.get(model, _UNIQUE):
            if hasattr(row, column):
                setattr(row, column, other(getattr(row, column)))
        if model is PeriodUsage:
            row.meter = "tokens"
        row._state.adding = True
        write(row)

    return damage


def delete(model: Model, **which: Any) -> Damage:
    def damage() -> None:
        found = rows(model).filter(**(which or {"pk": touched(model).pk}))
        assert found.exists()
        found._raw_delete(found.db)

    return damage


def watermark_moved(moment: str) -> Damage:
    return lambda: ShardState.objects.filter(pk=touched(ShardState).pk).update(watermark=at(moment))


def watermark_is_moved_ahead() -> None:
    ShardState.objects.filter(pk=touched(ShardState).pk).update(watermark=models.F("watermark") + 3_600_000_000)


def watermark_is_moved_past_redis() -> None:
    """Move a watermark ahead of usage that was not drained. This usage stays in Redis."""
    spend("acme", "2099-01-07")
    ShardState.objects.update(watermark=at("2099-01-08"))


def line_under_an_open_batch() -> None:
    """Insert a line whose primary key belongs to a closed batch, but whose column names the shard's newest batch."""
    line: Any = Line.objects.filter(account="acme", **_IN_OCTOBER).earliest("pk")
    newest = Batch.objects.filter(shard=line.batch.shard).order_by("position").last()
    line.pk, line.batch = line.pk + 1000, newest
    line.save(force_insert=True)


def line_of_no_batch() -> None:
    Line.objects.filter(pk=touched(Line).pk).update(batch_id=999_999)


def line_outside_all_batches() -> None:
    line = touched(Line)
    line.pk = 999_999 << 22
    line.save(force_insert=True)


def _batches() -> Any:
    return Batch.objects.filter(shard=touched(ShardState).pk)


def _without(batches: Any) -> None:
    for batch in batches:
        batch.lines()._raw_delete("default")
    batches._raw_delete("default")


def newest_batch_is_gone() -> None:
    _without(_batches().filter(pk=_batches().latest("position").pk))


def newest_batch_never_was() -> None:
    """Set the shard's state back to the previous batch."""
    newest_batch_is_gone()
    before = _batches().latest("position")
    ShardState.objects.filter(pk=before.shard).update(
        position=before.position, head=before.digest, seq=before.seq, cum=before.cum, incarnation=before.incarnation
    )


def all_batches_are_gone() -> None:
    _without(_batches())


def report_is_gone(**which: Any) -> None:
    report = Report.objects.filter(**which).latest("version")
    Adjustment.objects.filter(report=report)._raw_delete("default")
    report.lines.all()._raw_delete("default")
    Report.objects.filter(pk=report.pk)._raw_delete("default")


def _totals(line: Any) -> Any:
    """Return the totals to which a line was added."""
    about = {name: getattr(line, name) for name in ("account", "meter", "rule")}
    return PeriodUsage.objects.filter(**about, period__lte=line.bin, period_end__gt=line.bin)


def _rebuild(line: Any, *, chain: bool = True, totals: bool = True, more: int = 1) -> None:
    """Add a unit to a line, and compute its checksum, batch, chain, state and totals again.

    `more` is added to the running sum.
    """
    line.admitted_units += 1
    line.checksum = checksum(canonical([getattr(line, name) for name in (*SUBJECT, *COUNTERS)]))
    line.save()
    batch, digest = line.batch, ""
    if totals:
        _totals(line).filter(shard=batch.shard).update(admitted_units=models.F("admitted_units") + 1)
    for each in Batch.objects.filter(shard=batch.shard).order_by("position"):
        if not chain and each.pk != batch.pk:
            continue
        added = more if each.incarnation == batch.incarnation else 0
        each.previous_cum += added if each.position > batch.position else 0
        each.cum += added if each.position >= batch.position else 0
        lines = [canonical(row) for row in each.lines().values_list(*SUBJECT, *COUNTERS)]
        each.content = content_digest(header_of(each), lines)
        each.previous_digest = digest if chain else each.previous_digest
        each.digest = digest = reduce(chained, each.contents(), each.previous_digest)
        each.save()
    if chain:
        newest = Batch.objects.filter(shard=batch.shard).latest("position")
        ShardState.objects.filter(pk=batch.shard).update(head=newest.digest, cum=newest.cum)


def _open_line(*, joined: bool) -> Any:
    lines = Line.objects.filter(bin__gte=_IN_OCTOBER["bin__lt"])
    return (lines.exclude(batch__parts=b"") if joined else lines.filter(batch__parts=b"")).latest("pk")


def joined_batch_is_rebuilt() -> None:
    """Add a unit and remove a request in a joined batch: no link of the chain covers its lines."""
    line = _open_line(joined=True)
    line.admitted_requests -= 1
    _totals(line).update(admitted_requests=models.F("admitted_requests") - 1)
    _rebuild(line, chain=False, more=0)


def parts_are_exchanged() -> None:
    batch = Batch.objects.exclude(parts=b"").latest("pk")
    parts = bytes(batch.parts)
    Batch.objects.filter(pk=batch.pk).update(parts=parts[32:] + parts[:32])


def signature_of_a_joined_batch() -> None:
    batch = Batch.objects.exclude(parts=b"").latest("pk")
    Batch.objects.filter(pk=batch.pk).update(signature="")


def redigest(report: Report) -> None:
    """Compute the digests of a report and its later versions again, without the key: their signatures stay."""
    later = Report.objects.filter(account=report.account, period_start=report.period_start, version__gte=report.version)
    before = report.previous_digest
    for each in later.order_by("version"):
        each.previous_digest = before
        each.chain_head = signing.chain_head(each.chain, "default")
        digest = signing.Digest(each)
        for row in version_rows(each):
            digest.add(row)
        before = digest.hexdigest()
        Report.objects.filter(pk=each.pk).update(
            digest=before, previous_digest=each.previous_digest, chain_head=each.chain_head
        )


def everything_is_rebuilt() -> None:
    """Add a unit in the ledger and on the report, and compute again everything that needs no key."""
    line: Any = Line.objects.filter(account="acme", **_IN_OCTOBER, key="api_key:1").earliest("pk")
    _rebuild(line)
    sums = {"consumed_quantity": models.F("consumed_quantity") + 1}
    mine = ReportLine.objects.filter(report__account=line.account, usage_period=_OCTOBER, key=line.key)
    first = mine.filter(charge_category="usage", report__version=1).get()
    allowed = "overage_quantity" if first.overage_quantity else "included_quantity"
    ReportLine.objects.filter(pk=first.pk).update(**sums, **{allowed: models.F(allowed) + 1})
    for report in Report.objects.filter(version=1):
        redigest(report)


def name_on_a_report_is_rebuilt() -> None:
    line = touched(ReportLine)
    ReportLine.objects.filter(pk=line.pk).update(rule="another")
    redigest(Report.objects.get(pk=line.report_id))


def _redigested_lines(report: Report) -> None:
    """Compute a report's digest again, without the key, after lines were added or removed."""
    Report.objects.filter(pk=report.pk).update(line_count=report.lines.count())
    report.refresh_from_db()
    redigest(report)


def _second_version() -> Report:
    return Report.objects.get(account="acme", version=2)


def usage_is_skipped() -> None:
    """Let a version begin after the usage that it should add, and remove the lines of that usage."""
    report = _second_version()
    Report.objects.filter(pk=report.pk).update(since=dict.fromkeys(report.since, report.chain))
    report.lines.filter(charge_category="usage")._raw_delete("default")
    _redigested_lines(report)


def line_without_usage(**about: Any) -> Damage:
    def damage() -> None:
        report = _second_version()
        line: Any = report.lines.filter(charge_category="usage").latest("number")
        line.pk, line.line_id, line.number = None, "f" * 32, line.number + 100
        for name in ("consumed_quantity", "refunded_quantity", "admitted_count", "denied_count", "included_quantity"):
            setattr(line, name, 0)
        for name, value in about.items():
            setattr(line, name, value)
        write(line)
        _redigested_lines(report)

    return damage


def adjustment_is_split_otherwise() -> None:
    """Let an adjustment take its units from the overage, and not from the included quantity."""
    line = touched(Adjustment).report.lines.get(charge_category="adjustment")
    parts = {"included_quantity": line.included_quantity + 3, "overage_quantity": line.overage_quantity - 3}
    ReportLine.objects.filter(pk=line.pk).update(**parts)
    redigest(Report.objects.get(pk=line.report_id))


def waiting_adjustment_is_approved(**by: Any) -> None:
    assert Adjustment.objects.filter(approval="waiting").update(approval="approved", **by)


def adjustment_that_nobody_made() -> None:
    row = touched(Adjustment)
    row.pk, row.reference, row.report_id = None, other(row.reference), None
    write(row)


def quarantine_is_discarded() -> None:
    row = rows(QuarantinedBatch).last()
    rows(QuarantinedBatch).filter(pk=row.pk).update(resolution="discarded by ada", resolved_at=moment(at("2026-11-07")))
    ShardState.objects.filter(pk=row.shard).update(frozen=False)


def first_version_is_the_second() -> None:
    """Make a first version look like a second version, to avoid checks of first versions. The key is not used."""
    report = Report.objects.get(account="acme", period_start=at("2026-09-01"))
    Report.objects.filter(pk=report.pk).update(version=2)
    report.refresh_from_db()
    redigest(report)


def open_total_never_ends() -> None:
    row = rows(PeriodUsage).filter(account="hidden").last()
    rows(PeriodUsage).filter(pk=row.pk).update(period_end=row.period + 10 * 365 * 86_400)


def gap_on_a_report_is_rebuilt() -> None:
    report = Report.objects.get(account="acme", version=1, period_start=_OCTOBER * 10**6)
    Report.objects.filter(pk=report.pk).update(gaps="")
    report.refresh_from_db()
    redigest(report)


def _columns(model: Model) -> Iterator[str]:
    for field in model._meta.concrete_fields:
        if field.attname not in TABLES[model]:
            yield field.attname


def kinds_of(model: Model) -> dict[str, Damage]:
    name = model.__name__
    return {
        **{f"{name}.{column} changed": change(model, column) for column in _columns(model)},
        **{f"{name}.{column} exchanged": swap(model, column) for column in _columns(model)},
        f"{name} inserted": insert(model),
        f"{name} deleted": delete(model),
        f"{name} emptied": delete(model, pk__gte=0),
    }


TAMPERINGS: dict[str, Damage] = {
    **{name: damage for model in TABLES if model is not ArchivedRange for name, damage in kinds_of(model).items()},
    "a watermark is moved back": watermark_moved("2026-10-20"),
    "a watermark is moved ahead": watermark_is_moved_ahead,
    "a watermark is moved past what waits in Redis": watermark_is_moved_past_redis,
    "a line under an open batch": line_under_an_open_batch,
    "a line of no batch": line_of_no_batch,
    "a line outside all batches": line_outside_all_batches,
    "the newest batch is gone": newest_batch_is_gone,
    "the newest batch never was": newest_batch_never_was,
    "all batches of a shard are gone": all_batches_are_gone,
    "an account's only report is gone": lambda: report_is_gone(account="initech"),
    "a report's newest version and its adjustment are deleted": lambda: report_is_gone(account="acme", version=3),
    "a month is hidden": lambda: PeriodUsage.objects.filter(account="hidden").update(covered=10**6),
    "a line's checksum is rebuilt": lambda: _rebuild(touched(Line), chain=False, totals=False),
    "a line's checksum, batch and total are rebuilt": lambda: _rebuild(touched(Line), chain=False),
    "reported usage and its chain are rebuilt": lambda: _rebuild(touched(Line)),
    "open usage is changed, and its chain is computed again": lambda: _rebuild(_open_line(joined=False)),
    "open usage in a joined batch is changed, and the batch is computed again": joined_batch_is_rebuilt,
    "the parts of a joined batch are exchanged": parts_are_exchanged,
    "the signature of a joined batch is removed": signature_of_a_joined_batch,
    "a report's usage is changed, and its chain and digests are computed again": everything_is_rebuilt,
    "a name on a report is changed, and the digests are computed again": name_on_a_report_is_rebuilt,
    "a report's gaps are removed, and the digests are computed again": gap_on_a_report_is_rebuilt,
    "a version skips usage": usage_is_skipped,
    "a line without usage is billed": line_without_usage(overage_quantity=1000),
    "a line of another category is billed": line_without_usage(charge_category="fee", consumed_quantity=1000),
    "an adjustment is split otherwise": adjustment_is_split_otherwise,
    "a waiting adjustment is approved": waiting_adjustment_is_approved,
    "a waiting adjustment is approved by another person": lambda: waiting_adjustment_is_approved(
        decided_by=touched(Adjustment).author_id + 1, decided_at=moment(at("2026-11-03"))
    ),
    "a waiting adjustment is deleted": lambda: delete(Adjustment, approval="waiting")(),
    "an adjustment that nobody made is inserted": adjustment_that_nobody_made,
    "a quarantined batch is marked as discarded": quarantine_is_discarded,
    "the process totals of admitted requests are deleted": delete(ProcessTotal, kind="admitted"),
    "a first version is called the second": first_version_is_the_second,
    "an open total never ends": open_total_never_ends,
    "a moment of no calendar": lambda: Report.objects.filter(pk=touched(Report).pk).update(period_start=2**62),
    "a period of no calendar": lambda: PeriodUsage.objects.filter(pk=touched(PeriodUsage).pk).update(period=2**62),
    "a time zone of no place": lambda: Report.objects.filter(pk=touched(Report).pk).update(timezone="Nowhere"),
    "a report's signature is replaced by a text that is not a number": lambda: Report.objects.filter(
        pk=touched(Report).pk
    ).update(signature="é"),
}
#: The tampering with archived ranges. The test also has their archive.
OF_ARCHIVES = kinds_of(ArchivedRange)
