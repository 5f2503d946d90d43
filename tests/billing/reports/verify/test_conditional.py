"""Test that what changes legitimately after a manifest was written does not differ from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db.models import F
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from ratelimits.billing.models import PushDelivery
from ratelimits.billing.push.deliveries import plan
from ratelimits.billing.push.receivers import receiver
from ratelimits.billing.reports.verify.manifest import build, compare, parse
from ratelimits.models import Account, FrozenPeriod
from ratelimits.moments import moment
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import gaps, process_totals
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.models import ArchivedRange, Batch, ProcessTotal, ShardState
from tests.billing.push.fakes import FAKES, options
from tests.support.reports.edits import edit_at
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow
from tests.usage.ledger.test_clocks import seal_at

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _october(fsync_at_once: None) -> None:
    """Close October of an account whose terms changed, with two batches, and totals of processes of two kinds."""
    acme = account(included=5)
    for key in ("api_key:1", "api_key:2"):
        spend(acme, "2026-10-15", 7, key=key)
        flow()
    bin_ = at("2026-10-15") // 10**6
    admitted = TotalKey("admitted", "acme", "", "requests", bin_)
    for process in ("p1", "p2"):
        process_totals.write(process, {admitted: (1, 7), admitted._replace(kind="unanswered"): (1, 7)})
    Account.objects.filter(identifier="acme").update(timezone="Europe/Berlin")
    close("2026-11-02")
    assert FrozenPeriod.objects.exists()


def usage_comes(_directory: Path) -> None:
    spend("acme", "2026-11-20")
    assert flow().batches == 1


def idle_shards_go_on(_directory: Path) -> None:
    ShardState.objects.update(watermark=F("watermark") + 3_600_000_000)


def the_server_restarts(_directory: Path) -> None:
    """Let each shard have another run, as a drain does that finds no usage of it."""
    for state in ShardState.objects.all():
        gaps.declare_restart("default", state, "another", until=at("2026-11-03"), fsync="always", live_runs={})
    ShardState.objects.update(run="another")


def the_clock_is_ahead(_directory: Path) -> None:
    now = time.time_ns() // 1000
    seal_at(now + 3_600_000_000, now)
    drain(now)
    assert ShardState.objects.filter(ahead__gt=0).exists()


def the_clock_was_ahead(directory: Path) -> None:
    the_clock_is_ahead(directory)
    now = time.time_ns() // 1000
    seal_at(now, now)
    drain(now)
    assert not ShardState.objects.exclude(ahead=0).exists()


def batches_are_joined(_directory: Path) -> None:
    ShardState.objects.update(watermark=time.time_ns() // 1000 + 7_200_000_000)
    assert list(compact())


def usage_is_archived(directory: Path) -> None:
    call_command("ratelimits_archive", directory, before="2026-11", verbosity=0)
    assert ArchivedRange.objects.exists()


def totals_are_summed(_directory: Path) -> None:
    assert process_totals.fold(at("2026-12-01") // 10**6) == 1
    assert ProcessTotal.objects.filter(process="").exists()


def terms_change_again(_directory: Path) -> None:
    before = FrozenPeriod.objects.count()
    with edit_at("2027-02-01"):
        Account.objects.filter(identifier="acme").update(timezone="Asia/Kolkata")
    assert FrozenPeriod.objects.count() > before


CHANGES: tuple[Callable[[Path], None], ...] = (
    *(usage_comes, idle_shards_go_on, the_server_restarts, the_clock_is_ahead, the_clock_was_ahead),
    *(batches_are_joined, usage_is_archived, totals_are_summed, terms_change_again),
)


def written() -> dict[str, Any]:
    return parse(json.dumps(build("default", "2026-10")))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_legitimate_change_does_not_differ(change: Callable[[Path], None], tmp_path: Path) -> None:
    manifest = written()
    assert list(compare("default", manifest)) == []
    change(tmp_path / "files")
    # A gap that was declared since is no tampering either, but what the manifest lists of gaps has one more.
    assert [finding for finding in compare("default", manifest) if "it is newer" not in finding] == []


def test_usage_that_was_archived_and_restored_does_not_differ(tmp_path: Path) -> None:
    before, manifest = list(Batch.objects.order_by("position").values_list("position", "applied_at")), written()
    usage_is_archived(tmp_path)
    for path in archive.files(tmp_path):
        archive.restore("default", path)
    assert list(Batch.objects.order_by("position").values_list("position", "applied_at")) == before
    assert not ArchivedRange.objects.exists()
    # Archiving deletes the totals of admitted requests, and restoring brings none back.
    assert not ProcessTotal.objects.filter(kind="admitted").exists()
    assert list(compare("default", manifest)) == []


def test_totals_of_a_day_that_was_never_archived_may_not_be_missing(tmp_path: Path) -> None:
    bin_ = at("2026-11-20") // 10**6
    process_totals.write("p1", {TotalKey("admitted", "acme", "", "requests", bin_): (1, 7)})
    spend("acme", "2026-11-20")
    flow()
    manifest = parse(json.dumps(build("default", "2026-11")))
    usage_is_archived(tmp_path)
    for path in archive.files(tmp_path):
        archive.restore("default", path)
    assert list(compare("default", manifest)) == []
    ProcessTotal.objects.filter(bin=bin_).delete()
    assert ["admitted" in finding for finding in compare("default", manifest)] == [True]


def test_archived_batches_are_compared_where_the_archive_is_at_hand(
    tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> None:
    manifest = written()
    usage_is_archived(tmp_path)
    with django_db_blocker.unblock(), archive.opened("default", archive.files(tmp_path)) as moved:
        assert list(compare("default", manifest, "default", moved)) == []
        Batch.objects.using(moved).update(fence="none", applied_at=moment(0))
        findings = list(compare("default", manifest, "default", moved))
    assert ["has another fence" in finding or "at other times" in finding for finding in findings] == [True, True]


def test_a_delivery_that_was_tried_may_be_tried_again() -> None:
    with FAKES["lago"]() as fake, override_settings(RATELIMITS={"PUSH": {"lago": options("lago", fake)}}):
        plan(receiver("lago"), moment(at("2026-11-02")))
        rows = PushDelivery.objects.filter(state="waiting")
        untried = written()
        assert rows.update(attempts=1) == 2
        assert len(list(compare("default", untried))) == 1
        rows.update(unsure_since=moment(at("2026-11-02")), note="busy")
        manifest = written()
        rows.update(attempts=2, claim=uuid4(), due_at=moment(at("2026-11-02")) + timedelta(hours=1), together=1)
        assert list(compare("default", manifest)) == []
