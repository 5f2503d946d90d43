from __future__ import annotations

import gc
import io
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import GeneratorType
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from pytest_django import DjangoAssertNumQueries

from ratelimits import moments
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.packet import canonical, checksum
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import ArchivedRange, Batch, ChainMark, Line, ProcessTotal, ShardState
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT
from ratelimits.usage.signatures import sign
from tests.billing.reports.closing.test_close import adjust
from tests.support.plain import PLAIN
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)

SIGNED = {**PLAIN, "SIGNING_KEY": "of the finance department"}


@pytest.fixture
def reports() -> list[Report]:
    """Make two versions of October and one of September."""
    acme = account(included=100)
    spend(acme, "2026-09-05", 40)
    spend(acme, "2026-10-15", 70, key="api_key:1")
    spend(acme, "2026-10-15", 70, key="api_key:2")
    written = close("2026-11-02")
    spend(acme, "2026-10-20", 7, key="api_key:2")
    adjust(-20)
    return written + close("2026-11-03")


def findings() -> list[str]:
    return [finding for report in Report.objects.order_by("pk") for finding in verify_report(report)]


def verify(stdout: io.StringIO | None = None, **options: Any) -> str:
    out = stdout or io.StringIO()
    call_command("ratelimits_verify", stdout=out, **options)
    return out.getvalue()


def exported() -> str:
    """Return the rows of which every export is made."""
    months = ("2026-09", "2026-10", "2026-11")
    return "\n".join("\t".join(row.texts()) for month in months for row in rows(statements(month)))


def test_reports_made_again_are_those_that_were_finalised(reports: list[Report]) -> None:
    assert [report.version for report in reports] == [1, 1, 2]
    assert findings() == []
    assert "No errors were found" in verify()


# Sockets that earlier tests have left are no matter of this test.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_it_leaves_no_cursor_behind_for_the_garbage_collector(reports: list[Report]) -> None:
    Line.objects.filter(admitted_units=70, key="api_key:2").update(admitted_units=71)
    gc.collect()
    with pytest.raises(CommandError) as caught:
        verify()
    left = [one for one in gc.get_objects() if isinstance(one, GeneratorType) and one.gi_code.co_name == "cursor_iter"]
    assert caught.value.__traceback__ is not None  # it keeps alive what the command used
    assert left == []


def test_shards_without_batches_take_no_query_each(
    reports: list[Report], django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    with CaptureQueriesContext(connection) as before:
        assert list(verify_ledger("default")) == []
    ShardState.objects.bulk_create([ShardState(shard=shard) for shard in range(1000, 1100)])
    with django_assert_num_queries(len(before)):
        assert list(verify_ledger("default")) == []


def test_a_digit_changed_in_the_ledger_is_found_with_the_line(reports: list[Report]) -> None:
    Line.objects.filter(admitted_units=70, key="api_key:2").update(admitted_units=71)
    line = ReportLine.objects.get(report=reports[1], key="api_key:2")
    (finding,) = findings()
    assert f"line {line.line_id} (api_key:2, requests) has consumed_quantity 70, the ledger says 71" in finding
    with pytest.raises(CommandError) as caught:
        verify()
    assert caught.value.returncode == 1


@pytest.mark.parametrize("column", [*SUBJECT, *COUNTERS])
def test_whatever_is_changed_in_the_ledger_the_command_names_the_line_and_fails(
    reports: list[Report], column: str
) -> None:
    line = Line.objects.get(admitted_units=70, key="api_key:2")
    value = getattr(line, column)
    setattr(line, column, f"{value}." if isinstance(value, str) else value + 1)
    line.save(update_fields=[column])
    out = io.StringIO()
    with pytest.raises(CommandError) as caught:
        verify(stdout=out)
    assert caught.value.returncode == 1
    assert f"line {line.pk} of batch {line.batch} " in out.getvalue()


def test_a_changed_line_whose_checksums_were_all_rebuilt_is_found_by_the_report_that_has_it(
    reports: list[Report],
) -> None:
    line = Line.objects.get(admitted_units=70, key="api_key:2")
    line.admitted_units, line.checksum = 71, 0
    line.checksum = checksum(canonical([getattr(line, name) for name in (*SUBJECT, *COUNTERS)]))
    line.save()
    assert any("(api_key:2, requests) has consumed_quantity 70, the ledger says 71" in found for found in findings())


def test_a_digit_changed_in_a_report_is_found_with_the_line(reports: list[Report]) -> None:
    ReportLine.objects.filter(report=reports[1], key="api_key:2").update(overage_quantity=1)
    first, second, third = findings()
    assert "do not match its digest" in first
    assert "overage_quantity 1, the ledger says 40" in second
    assert f"report {reports[2]}: " in third, "its adjustment takes off what the first version billed"


def test_usage_slipped_in_behind_a_report_is_found(reports: list[Report]) -> None:
    line = Line.objects.get(admitted_units=40)
    line.pk, line.key = line.pk + 1000, "api_key:9"
    line.save(force_insert=True)
    assert any(") is missing" in finding for finding in findings())


def test_with_a_key_a_rebuilt_digest_is_not_enough() -> None:
    with override_settings(RATELIMITS=SIGNED):
        spend(account(), "2026-10-15", 70)
        (report,) = close("2026-11-02")
        assert findings() == []
        Report.objects.filter(pk=report.pk).update(digest="0" * 64)
        assert any("signature was made neither with SIGNING_KEY" in finding for finding in findings())


def test_a_new_key_leaves_what_an_old_one_signed_verifiable() -> None:
    with override_settings(RATELIMITS=SIGNED):
        spend(account(), "2026-10-15", 70)
        (report,) = close("2026-11-02")
        assert findings() == []
    new = {**SIGNED, "SIGNING_KEY": "a new one"}
    with override_settings(RATELIMITS=new):
        assert any("signature was made neither with SIGNING_KEY" in finding for finding in findings())
    with override_settings(RATELIMITS={**new, "SIGNING_KEYS_OLD": ["older still", SIGNED["SIGNING_KEY"]]}):
        assert findings() == []
        spend("acme", "2026-10-20", 7)
        (corrected,) = close("2026-11-03")
        assert findings() == []
        assert corrected.signature == sign(corrected.digest) != ""
    with override_settings(RATELIMITS={**new, "SIGNING_KEYS_OLD": ["another"]}):
        assert any(f"report {report}: its signature" in finding for finding in findings())


def test_an_export_is_the_same_after_a_prune_and_after_a_restore(
    reports: list[Report], tmp_path: Path, manage: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    before = exported()
    spend("acme", "2026-11-20")
    close()
    call_command("ratelimits_archive", tmp_path, before="2026-11", stdout=io.StringIO())
    assert sum(Line.objects.values_list("admitted_units", flat=True)) == 1
    assert exported().splitlines()[: len(before.splitlines())] == before.splitlines()
    with pytest.raises(CommandError, match="has errors"):
        verify()
    assert "No errors were found" in manage("ratelimits_verify", "--archive", tmp_path).stdout
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    call_command("ratelimits_archive", tmp_path, restore=True, stdout=io.StringIO())
    assert not ArchivedRange.objects.exists()
    assert "No errors were found" in verify()
    call_command("ratelimits_archive", tmp_path, before="2026-11", stdout=io.StringIO())
    assert path.read_bytes() == content


def test_a_changed_archive_is_refused(
    reports: list[Report], tmp_path: Path, manage: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    call_command("ratelimits_archive", tmp_path, before="2026-11", stdout=io.StringIO())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused = manage("ratelimits_verify", "--archive", tmp_path)
    assert (refused.returncode, "ratelimits.gz" in refused.stderr) == (1, True)
    with pytest.raises(CommandError, match=r"ratelimits\.gz"):
        call_command("ratelimits_archive", tmp_path, restore=True)


def test_nothing_is_pruned_before_it_is_finalised(reports: list[Report], tmp_path: Path) -> None:
    spend("acme", "2026-10-21")
    close("2026-10-02")
    spend("late", "2026-09-21")
    flow()
    with pytest.raises(CommandError, match="not in a finalised report yet"):
        call_command("ratelimits_archive", tmp_path, before="2026-11")
    assert Batch.objects.count() > 2
    assert list(tmp_path.iterdir()) == []


def test_the_last_months_are_kept_by_their_number(
    reports: list[Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(moments, "now", lambda: datetime(2026, 12, 31, tzinfo=UTC))
    call_command("ratelimits_archive", tmp_path, keep=3, stdout=out)
    assert out.getvalue() == "", "September is kept"
    call_command("ratelimits_archive", tmp_path, keep=1, stdout=out)
    assert "lines" in out.getvalue()
    assert not Line.objects.exists()
    with pytest.raises(CommandError, match="at least one month"):
        call_command("ratelimits_archive", tmp_path, keep=0)


def test_what_processes_said_of_archived_usage_is_dropped(reports: list[Report], tmp_path: Path) -> None:
    for moment in ("2026-10-15", "2026-11-15"):
        process_totals.write("p1", {TotalKey("admitted", "acme", "", "requests", at(moment) // 10**6): (1, 1)})
    call_command("ratelimits_archive", tmp_path, before="2026-11", stdout=io.StringIO())
    assert ProcessTotal.objects.get().bin == at("2026-11-15") // 10**6


def test_marks_that_an_older_database_lacks_are_written_before_batches_are_joined(
    reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without marks the batches would be joined across the ends of reports, and no report could be made again."""
    for _again in range(2):
        spend("acme", "2026-11-21", 3)
        flow()
    before, batches = list(ChainMark.objects.values_list("shard", "position")), Batch.objects.count()
    assert len(before) == 2
    ChainMark.objects.all().delete()
    with pytest.raises(CommandError, match="has errors"):
        verify()
    out = io.StringIO()
    monkeypatch.setattr(compacting, "SPAN", 10**17)  # everything was sealed within one hour
    ShardState.objects.update(watermark=3 * 10**17)  # and this hour is over
    call_command("ratelimits_compact", "--mark", stdout=out)
    assert sorted(ChainMark.objects.values_list("shard", "position")) == sorted(before)
    assert out.getvalue().startswith("Joined 2 batches to 1: ")
    assert Batch.objects.count() == batches - 1
    assert "No errors were found" in verify()
