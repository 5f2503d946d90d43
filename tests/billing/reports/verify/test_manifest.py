"""Test unusual manifests: of an open month, another database, another version or another key, and half a file."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.verify.manifest import ManifestError, build, compare, parse
from ratelimits.billing.reports.verify.manifest_history import history
from ratelimits.models import Account
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.gaps import declare
from ratelimits.usage.models import DurabilityGap, GapKind, ProcessTotal
from tests.billing.reports.verify.test_report import SIGNED
from tests.support.reports.invoices import account, close, spend, token
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _october(fsync_at_once: None) -> None:
    """Close October of one account, with a gap and totals of processes."""
    spend(account(included=5), "2026-10-15", 7)
    process_totals.write("p1", {TotalKey("admitted", "acme", "", "requests", at("2026-10-15") // 10**6): (1, 7)})
    declare("default", GapKind.RESTART, "test", since=at("2026-10-15"), until=at("2026-10-16"))
    close("2026-11-02")


def found(manifest: dict[str, Any]) -> list[str]:
    return list(compare("default", parse(json.dumps(manifest))))


def told(manifest: Path) -> str:
    err = io.StringIO()
    call_command("ratelimits_verify", manifest=[manifest], stdout=io.StringIO(), stderr=err)
    return err.getvalue()


def written(path: Path) -> str:
    err = io.StringIO()
    call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=err)
    return err.getvalue()


def test_it_has_each_report_and_the_month_s_totals() -> None:
    manifest = build("default", "2026-10")
    ((name, report),) = manifest["reports"].items()
    assert (name, report["totals"]) == (f"{token()}.20261001T000000Z v1", {"requests": [7, 5, 2, 0]})
    assert manifest["totals"] == report["totals"]
    assert manifest["open"] == []
    assert found(manifest) == []
    assert manifest["time_zones"] == version("tzdata")


def test_the_summary_of_a_verification_has_nouns_that_fit_their_numbers(tmp_path: Path) -> None:
    written(tmp_path / "october.json")
    text = told(tmp_path / "october.json")
    assert "Checked 1 report, " in text
    assert ", 1 manifest, " in text
    assert " watermarks, " in text


def test_one_of_an_open_month_says_which_periods_are_open(tmp_path: Path) -> None:
    spend("initech", "2026-10-20")
    spend("initech", "2026-11-20")
    flow()
    assert "1 period of 2026-10 is open (initech 2026-10)" in written(tmp_path / "open.json")
    assert "Periods that were open when the manifest of 2026-10 was written: 1 (initech 2026-10)." in told(
        tmp_path / "open.json"
    )
    close("2026-11-03")
    assert (
        "is not in the manifest of 2026-10: it is newer" in found(json.loads((tmp_path / "open.json").read_text()))[0]
    )
    assert "open" not in written(tmp_path / "closed.json")


def test_one_of_another_database_is_named_as_such() -> None:
    manifest = build("default", "2026-10")
    manifest["shards"] = {shard: [position, "0" * 64] for shard, (position, _head) in manifest["shards"].items()}
    (finding,) = found(manifest)
    assert "the manifest is of another database" in finding


def test_one_of_an_older_version_is_compared_by_the_columns_that_it_has() -> None:
    manifest = build("default", "2026-10")
    columns = manifest["columns"]["gaps"]
    assert found(manifest) == []
    DurabilityGap.objects.update(detail="changed")
    assert any("durability gap" in finding for finding in found(manifest))
    columns.remove("detail")
    older = build("default", "2026-10")
    older["columns"]["gaps"] = columns
    older["gaps"] = dict.fromkeys(older["gaps"], "")
    assert [finding for finding in found(older) if "columns" in finding] == []
    columns.append("a column of later")
    assert any("has the columns a column of later of gaps" in finding for finding in found(older))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "not a complete manifest"),
        (lambda text: text.replace("manifest 5", "manifest 1"), "its format is 'ratelimits manifest 1'"),
        (lambda text: text.replace('"2026-10"', '"2026-13"'), "is not a month"),
        (lambda text: "[" * 100_000, "not a complete manifest of a month"),
        (lambda text: json.dumps({**json.loads(text), "shards": {"0": ["1", 2]}}), "do not have the types"),
        (lambda text: json.dumps({**json.loads(text), "reports": []}), "do not have the types"),
    ],
)
def test_what_is_not_a_whole_manifest_is_refused_with_the_reason(change: Any, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        parse(change(json.dumps(build("default", "2026-10"))))


def test_its_signature_outlives_a_new_key_and_is_missed_where_there_is_none() -> None:
    unsigned = build("default", "2026-10")
    with override_settings(RATELIMITS=SIGNED):
        Report.objects.update(signature="")
        signed = build("default", "2026-10")
        assert found(signed) == []
        assert "it has no signature" in found(unsigned)[0]
        signed["key_id"] = "0123456789abcdef"
        assert "(key 0123456789abcdef) was changed after it was written" in found(signed)[0]
    new = {**SIGNED, "SIGNING_KEY": "a new one"}
    with override_settings(RATELIMITS=SIGNED):
        signed = build("default", "2026-10")
    with override_settings(RATELIMITS=new):
        assert "its key is unknown" in found(signed)[0]
    with override_settings(RATELIMITS={**new, "SIGNING_KEYS_OLD": [SIGNED["SIGNING_KEY"]]}):
        assert found(signed) == []
        assert "it has no signature" in found(unsigned)[0]
    with override_settings(RATELIMITS={**new, "SIGNING_KEYS_OLD": [""]}):
        assert found(unsigned) == []


def test_what_is_dropped_with_archived_usage_does_not_differ(tmp_path: Path) -> None:
    spend("acme", "2026-11-20")
    flow()
    manifest = build("default", "2026-10")
    call_command("ratelimits_archive", tmp_path, before="2026-11", stdout=io.StringIO())
    assert not ProcessTotal.objects.exists()
    assert found(manifest) == []


def test_totals_that_are_dropped_while_their_usage_is_at_hand_differ() -> None:
    manifest = build("default", "2026-10")
    ProcessTotal.objects.all().delete()
    assert ["is in the manifest of 2026-10, but no longer exists" in finding for finding in found(manifest)] == [True]


def test_several_months_are_compared_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{month}.json" for month in ("2026-09", "2026-10")]
    for path in paths:
        call_command("ratelimits_manifest", path.stem, output=path, stdout=io.StringIO(), stderr=io.StringIO())
    ReportLine.objects.all()._raw_delete("default")
    Report.objects.all()._raw_delete("default")
    with pytest.raises(CommandError, match="has errors"):
        call_command("ratelimits_verify", manifest=paths, stdout=io.StringIO(), stderr=io.StringIO())


def test_a_history_that_was_dumped_and_loaded_does_not_differ(tmp_path: Path) -> None:
    records: Any = Account.history.all()
    records.update(history_date=datetime(2026, 10, 1, 12, 0, 0, 123_456, UTC))
    manifest = build("default", "2026-10")
    call_command("dumpdata", "ratelimits.historicalaccount", output=str(tmp_path / "history.json"), verbosity=0)
    call_command("loaddata", str(tmp_path / "history.json"), verbosity=0)
    assert records.first().history_date.microsecond == 123_000
    assert found(manifest) == []
    records.update(history_date=datetime(2026, 10, 1, 12, 0, 1, 123_456, UTC))
    assert any("the history of account" in finding for finding in found(manifest))


def test_one_of_an_earlier_version_has_the_history_s_times_in_microseconds() -> None:
    manifest = build("default", "2026-10")
    manifest["history"] = history("default", {name: _exact(entry) for name, entry in manifest["history"].items()})
    assert found(manifest) == []


def _exact(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "times"}
