"""Test that a finalised report is the same file, whenever and from whichever database it is exported."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from shutil import rmtree

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from jsonschema import Draft202012Validator

from ratelimits.billing.reports.exports import DOWNLOADS
from ratelimits.billing.reports.exports.json import schema
from tests.support import forked
from tests.support.once import made_once
from tests.support.reports.exporter import MONTHS
from tests.support.servers import DATABASES, TestServers

ROOT = Path(__file__).resolve().parents[3]
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def exported(
    servers: TestServers, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Files]:
    """Return each file's bytes by database and time of export."""

    def make(folder: Path) -> None:
        for database in DATABASES:
            export(servers.redis_kind, database, folder / database)

    folder = made_once("exported", pytestconfig, tmp_path_factory, make)
    return {
        (database, when): {path.name: path.read_bytes() for path in (folder / database / when).iterdir()}
        for database in DATABASES
        for when in ("first", "pruned", "restored")
    }


def export(redis_kind: str, database: str, directory: Path) -> None:
    """Write the files from this database, which has its own server."""
    # An attempt that failed may have left files.
    rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    own = TestServers(redis_kind, database)
    try:
        command = [sys.executable, "-m", "tests.support.reports.exporter", str(directory)]
        done = forked.run(command, cwd=ROOT, env={**os.environ, **own.environment})
        assert done.returncode == 0
    finally:
        own.stop()


def test_every_file_is_the_same_again_on_both_databases_pruned_and_restored(
    exported: dict[tuple[str, str], Files],
) -> None:
    first = exported["sqlite", "first"]
    assert first.keys() == {f"{month}.{form}" for month in MONTHS for form in DOWNLOADS}
    assert all(first.values())
    differing = {
        (database, when, name)
        for (database, when), files in exported.items()
        for name, content in files.items()
        if content != first[name]
    }
    assert differing == set()


@pytest.fixture
def files(exported: dict[tuple[str, str], Files]) -> Files:
    return exported["sqlite", "first"]


def test_the_files_have_what_was_billed_in_the_order_of_code_points(files: Files) -> None:
    lines = list(csv.DictReader(files["2026-10.csv"].decode().splitlines()))
    accounts = [line["account"] for line in lines]
    assert accounts == sorted(accounts)
    assert {line["charge_category"] for line in lines} == {"usage", "adjustment"}
    assert {line["charge_class"] for line in lines} == {"", "correction"}
    assert {"0", "2"} == {line["unknown_count"] for line in lines}
    assert all(line["durability_gap"].startswith("restart 2026-10-04T00:00:00Z") for line in lines)
    assert "'=1+1" in {line["key"] for line in lines}


@pytest.mark.parametrize("month", MONTHS)
def test_the_json_validates_against_the_published_schema(files: Files, month: str) -> None:
    document = json.loads(files[f"{month}.json"])
    Draft202012Validator(schema()).validate(document)
    assert len(document["lines"]) == files[f"{month}.csv"].count(b"\n") - 1


@pytest.mark.parametrize("month", MONTHS)
def test_the_official_sdk_reads_every_event(files: Files, month: str) -> None:
    events = [JSONFormat().read(CloudEvent, line) for line in files[f"{month}.cloudevents-ndjson"].splitlines()]
    assert len({event.get_id() for event in events}) == len(events) == files[f"{month}.csv"].count(b"\n") - 1
    batch = json.loads(files[f"{month}.cloudevents"])
    assert [event["id"] for event in batch] == [event.get_id() for event in events]
