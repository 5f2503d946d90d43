"""Whatever is changed in the tables of the ledger and the reports, `ratelimits_verify` sees it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, models, transaction
from django.test import override_settings

from ratelimits.models import (
    Adjustment,
    Batch,
    ChainMark,
    DurabilityGap,
    Line,
    PeriodUsage,
    ProcessTotal,
    QuarantinedBatch,
    Report,
    ReportLine,
    ShardState,
)
from ratelimits.usage import totals
from ratelimits.witness import Place
from tests.reports.invoices import account, close, spend
from tests.reports.test_close import adjust
from tests.reports.test_verify import SIGNED
from tests.usage.quarantine import Fork
from tests.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)

#: The columns of each table that are changed, one by one. Left out is what says nothing of usage: when a row was
#: written, and which process a total came from.
COLUMNS: dict[type[models.Model], str] = {
    Batch: "shard incarnation seq position previous_cum cum content previous_digest digest opened_at sealed_at run"
    " sealed_run follows line_count first_seq first_position parts signature",
    Line: "batch_id account key meter rule version period bin admitted_requests admitted_units denied_requests"
    " denied_units refunded_requests refunded_units shadow_requests shadow_units checksum",
    ShardState: "incarnation seq cum position head tallied frozen",
    PeriodUsage: "account period meter rule shard admitted_requests admitted_units denied_requests refunded_units"
    " covered",
    Report: "account period_start period_end timezone version plan included since chain chain_head gaps line_count"
    " previous_digest digest signature",
    ReportLine: "number line_id key meter unit charge_category charge_class corrects_line_id charge_period_start"
    " charge_period_end consumed_quantity included_quantity overage_quantity refunded_quantity admitted_count"
    " denied_count unknown_count limit rule rule_version plan batch_range durability_gap usage_period rule_id",
    Adjustment: "reference account period_start meter key quantity corrects_line_id reason report_id",
    DurabilityGap: "event kind shard account since until fsync units",
    ProcessTotal: "kind account key meter bin requests units",
    ChainMark: "shard position",
    QuarantinedBatch: "shard name reason content fields resolution resolved_at",
}
#: The column that two rows of a table exchange.
SWAPPED: dict[type[models.Model], str] = {
    Batch: "content",
    Line: "admitted_units",
    ShardState: "head",
    PeriodUsage: "admitted_units",
    Report: "included",
    ReportLine: "consumed_quantity",
    Adjustment: "quantity",
    DurabilityGap: "until",
    ProcessTotal: "requests",
}

Damage = Callable[[], object]


def other(value: Any) -> Any:
    """Return a value of the same type that is another one."""
    if value is None:
        return 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
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


def touched(model: type[models.Model]) -> models.Model:
    """Return the row that is changed: the newest that is of a closed period, where a table has such."""
    rows: Any = model._default_manager.order_by("pk")
    which: dict[type[models.Model], dict[str, Any]] = {
        Batch: {"position__gt": 1},
        Line: {"period": at("2026-10-01") // 10**6},
        ShardState: {"position__gt": 1},
        PeriodUsage: {"period": at("2026-10-01") // 10**6},
        ReportLine: {"charge_category": "usage"},
        Adjustment: {"report__isnull": False},
    }
    found: models.Model | None = rows.filter(**which.get(model, {})).last()
    assert found is not None, model
    return found


def change(model: type[models.Model], column: str) -> Damage:
    def damage() -> None:
        row = touched(model)
        value = getattr(row, column)
        if column == "resolved_at":
            value = QuarantinedBatch.objects.values_list("arrived_at", flat=True)[0]
        if column == "report_id":
            value = Report.objects.exclude(pk=value).values_list("pk", flat=True)[0] - 1
        model._default_manager.filter(pk=row.pk).update(**{column: other(value)})

    return damage


def insert(model: type[models.Model]) -> Damage:
    def damage() -> None:
        row: Any = touched(model)
        row.pk = 999 if model is ShardState else row.pk + 1000 if model is Line else None
        for column in ("seq", "number", "version", "position") if model not in (ShardState, PeriodUsage, Line) else ():
            if hasattr(row, column):
                setattr(row, column, getattr(row, column) + 1)
        for column in ("event", "reference", "process", "name"):
            if hasattr(row, column):
                setattr(row, column, other(getattr(row, column)))
        if model is PeriodUsage:
            row.meter = "tokens"
        if model is ShardState:
            row.shard = 999
        row._state.adding = True
        row.save(force_insert=True)

    return damage


def swap(model: type[models.Model], column: str) -> Damage:
    def damage() -> None:
        one: Any = touched(model)
        rows: Any = model._default_manager.order_by("pk").exclude(pk=one.pk)
        two = next(row for row in rows if getattr(row, column) != getattr(one, column))
        first, second = getattr(one, column), getattr(two, column)
        model._default_manager.filter(pk=one.pk).update(**{column: second})
        model._default_manager.filter(pk=two.pk).update(**{column: first})

    return damage


def delete(model: type[models.Model], **which: Any) -> Damage:
    def damage() -> None:
        rows: Any = (
            model._default_manager.filter(**which) if which else model._default_manager.filter(pk=touched(model).pk)
        )
        assert rows.exists()
        rows._raw_delete(rows.db)

    return damage


def line_under_an_open_batch() -> None:
    """A line among a closed batch's, that its own column counts to the newest batch of its shard."""
    line: Any = Line.objects.filter(batch__position=1, account="acme").order_by("pk").last()
    newest = Batch.objects.filter(shard=line.batch.shard).order_by("position").last()
    line.pk, line.batch = line.pk + 1000, newest
    line.save(force_insert=True)


def line_of_no_batch() -> None:
    Line.objects.filter(pk=touched(Line).pk).update(batch_id=999_999)


def line_outside_all_batches() -> None:
    line: Any = touched(Line)
    line.pk = 999_999 << 22
    line.save(force_insert=True)


def newest_batch() -> Batch:
    return Batch.objects.filter(shard=touched(ShardState).pk).latest("position")


def newest_batch_is_gone() -> None:
    batch = newest_batch()
    batch.lines()._raw_delete("default")
    Batch.objects.filter(pk=batch.pk)._raw_delete("default")


def newest_batch_never_was() -> None:
    """The shard's state is set back to the batch before."""
    batch = newest_batch()
    newest_batch_is_gone()
    before = newest_batch()
    ShardState.objects.filter(pk=batch.shard).update(
        position=before.position, head=before.digest, seq=before.seq, cum=before.cum, incarnation=before.incarnation
    )


def all_batches_are_gone() -> None:
    batches = Batch.objects.filter(shard=touched(ShardState).pk)
    for batch in batches:
        batch.lines()._raw_delete("default")
    batches._raw_delete("default")


def report_is_gone(**which: Any) -> None:
    report = Report.objects.filter(**which).latest("version")
    Adjustment.objects.filter(report=report)._raw_delete("default")
    report.lines.all()._raw_delete("default")
    Report.objects.filter(pk=report.pk)._raw_delete("default")


TAMPERINGS: dict[str, Damage] = {
    **{f"{m.__name__}.{column} changed": change(m, column) for m, names in COLUMNS.items() for column in names.split()},
    **{f"{model.__name__} inserted": insert(model) for model in COLUMNS},
    **{f"{model.__name__} deleted": delete(model) for model in COLUMNS},
    **{f"{model.__name__}.{column} swapped": swap(model, column) for model, column in SWAPPED.items()},
    "a line under an open batch": line_under_an_open_batch,
    "a line of no batch": line_of_no_batch,
    "a line outside all batches": line_outside_all_batches,
    "the newest batch is gone": newest_batch_is_gone,
    "the newest batch never was": newest_batch_never_was,
    "all batches of a shard are gone": all_batches_are_gone,
    "all states are gone": delete(ShardState, pk__gte=0),
    "an account's only report is gone": lambda: report_is_gone(account="initech"),
    "the newest version is gone with its adjustment": lambda: report_is_gone(account="acme", version=3),
    "a month is hidden": lambda: PeriodUsage.objects.filter(account="hidden").update(covered=10**6),
    "all gaps are gone": delete(DurabilityGap, pk__gte=0),
    "all totals of processes are gone": delete(ProcessTotal, pk__gte=0),
    "all ends of reports are gone": delete(ChainMark, pk__gte=0),
}

#: What cannot be seen from the database alone: nothing else there says it.
UNSEEN = {
    "Adjustment.reason changed",
    *(f"DurabilityGap.{column} changed" for column in ("event", "shard", "account", "units")),
    "DurabilityGap inserted",
    *(f"ProcessTotal.{column} changed" for column in COLUMNS[ProcessTotal].split()),
    *(f"ProcessTotal {what}" for what in ("inserted", "deleted")),
    "ProcessTotal.requests swapped",
    "all totals of processes are gone",
    *(f"QuarantinedBatch.{column} changed" for column in ("name", "reason", "content", "fields", "resolution")),
    "QuarantinedBatch inserted",
    "the newest version is gone with its adjustment",
}
#: What is not seen without SIGNING_KEY either.
UNSEEN_WITHOUT_KEY = {"Report.signature changed"}


@pytest.fixture(params=["signed", "unsigned"])
def signed(request: pytest.FixtureRequest) -> Iterator[bool]:
    settings = SIGNED if request.param == "signed" else {**SIGNED, "SIGNING_KEY": ""}
    with override_settings(RATELIMITS={**settings, "RECEIPT_TTL": 10 * 365 * 86_400, "SHARDS": 4}):
        yield request.param == "signed"


@pytest.fixture
def _books(signed: bool, fork: Fork) -> None:
    """Reports of two accounts in two months, an adjustment, a gap, open usage, joined batches, and a quarantine."""
    acme = account(included=100)
    spend(acme, "2026-09-05", 40)
    spend(acme, "2026-10-15", 70, key="api_key:1")
    spend(acme, "2026-10-15", 71, key="api_key:2")
    spend("initech", "2026-10-16", 9)
    for process in ("p1", "p2"):
        admitted = Place("admitted", "acme", "api_key:1", "requests", at("2026-10-15") // 10**6)
        lost = Place("unanswered", "acme", "api_key:1", "requests", at("2026-10-15") // 10**6)
        elsewhere = Place("unanswered", "initech", "", "requests", at("2026-10-16") // 10**6)
        number = len(process) + (process == "p2")
        totals.write(process, {admitted: (number, number), lost: (number, number), elsewhere: (1, 1)})
    flow()
    spend(acme, "2026-10-15", 5)
    close("2026-11-02")
    spend(acme, "2026-10-20", 7, key="api_key:2")
    adjust(-20)
    close("2026-11-03")
    adjust(-5)
    close("2026-11-03")
    for day in ("2026-11-05", "2026-11-06"):
        spend(acme, day, 3)
        spend("hidden", day, 3)
        flow()
    fork(5)


def complains(*manifests: Path) -> bool:
    options = [text for path in manifests for text in ("--manifest", str(path))]
    try:
        call_command("ratelimits_verify", *options, stdout=io.StringIO(), stderr=io.StringIO())
    except CommandError:
        return True
    return False


def unseen(names: Iterable[str], *manifests: Path) -> set[str]:
    found = set()
    for name in names:
        damage = TAMPERINGS[name]
        with transaction.atomic():
            try:
                with transaction.atomic():
                    damage()
                    connection.check_constraints()
            except IntegrityError:
                continue  # the database itself refuses it
            if not complains(*manifests):
                found.add(name)
            transaction.set_rollback(True)
    return found


@pytest.mark.usefixtures("_books")
def test_every_tampering_is_seen_but_those_that_nothing_in_the_database_says(signed: bool) -> None:
    assert not complains()
    expected = UNSEEN if signed else UNSEEN | UNSEEN_WITHOUT_KEY
    found = unseen(TAMPERINGS)
    assert found == expected, "\n".join(["unseen:", *sorted(found - expected), "seen:", *sorted(expected - found)])


@pytest.mark.usefixtures("_books")
def test_with_the_manifest_at_hand_nothing_that_it_lists_goes_unseen(signed: bool, tmp_path: Path) -> None:
    path = tmp_path / "2026-10.json"
    call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=io.StringIO())
    assert not complains(path)
    assert unseen(UNSEEN | UNSEEN_WITHOUT_KEY, path) == set()
    changed = json.loads(path.read_text())
    changed["reports"].popitem()
    path.write_text(json.dumps(changed))
    assert complains(path)
    with pytest.raises(CommandError, match="could not be written"):
        call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=io.StringIO())
    path.write_text("{}")
    with pytest.raises(CommandError, match="no manifest of a month"):
        call_command("ratelimits_verify", manifest=[path], stdout=io.StringIO())
