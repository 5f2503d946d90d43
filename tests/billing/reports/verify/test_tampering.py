"""Test that `ratelimits_verify` sees every change in the tables from which bills are made.

`pytest tests/billing/reports/verify/test_tampering.py --long -s` tries all kinds of tampering, and prints how many are
seen with what; without `--long` those that need the key or a manifest are tried, and a sample of the others. On
PostgreSQL it is a sample of all: the kinds are the same there, and only what the database refuses is not.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from ratelimits.billing.models import Adjustment, PushDelivery, Report
from ratelimits.billing.push.deliveries import plan, send
from ratelimits.billing.push.receivers import receiver
from ratelimits.billing.reports.verify.manifest import build, parse
from ratelimits.billing.verification import Verification
from ratelimits.models import Access, Account, FrozenPeriod, KeyOverride, Name, Plan, PlanMembership, Rule
from ratelimits.moments import moment
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.erasure.erase import erase
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.gaps import declare
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.archive import ArchiveError
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.models import ArchivedRange, Batch, GapChange, GapKind, ShardState
from tests.billing.push.fakes import FAKES, options
from tests.billing.reports.closing.test_close import adjust
from tests.billing.reports.verify.test_report import SIGNED
from tests.support.own_apps import own_models
from tests.support.reports.edits import change as change_terms
from tests.support.reports.edits import edit_at
from tests.support.reports.edits import spend as spend_by_terms
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import priced
from tests.support.reports.tampering import OF_ARCHIVES, TABLES, TAMPERINGS, Damage, NotApplicableError
from tests.support.reports.tampering_beside import OF_HISTORY, OF_PUSHING, OF_TERMS
from tests.support.usage.quarantine import Fork
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "billing" / "tampering.md").read_text()
MONTHS = ("2026-09", "2026-10")
#: What verify has in addition to the database: the signing key, the manifests.
MEANS = {"database": (False, False), "key": (True, False), "manifest": (False, True), "key and manifest": (True, True)}
SETTINGS = {**SIGNED, "RECEIPT_TTL": 10 * 365 * 86_400, "SHARDS": 4}
#: The accounts' names in billing systems.
CUSTOMERS = {"acme": "cus_1", "initech": "cus_2"}
REFUSED, NOTHING, UNSEEN = "refused by the database", "not applicable", "unseen"
#: Tables with only single kinds of tampering: their rows say what is still to be done, not what was done.
NOTES = {"ConfigVersion", "GapChange", "PushReceiver"}
#: Tables that no bill depends on: sent alerts, what pages of the admin show, resets, moves that were made, tombstones,
#: and uploads. Reports have the tokens of their customers, in their digests.
OTHER_TABLES = {
    *("Alert", "AlertChannel", "AlertDelivery", "AlertState"),
    *("Customer", "Move", "Name"),
    *("Change", "Inspect", "KeyReset", "KeyTotal", "RecordedRequest", "RuleTotal"),
    *("Shadow", "Status", "TaskRun", "Tombstone", "Upload"),
}


@pytest.fixture
def accounts() -> Iterator[list[Account]]:
    """Make two accounts in two time zones, before anything is counted: an edit in a test changes the names of keys."""
    with override_settings(RATELIMITS=SETTINGS):
        yield [account(included=100), account("initech", timezone="Europe/Berlin")]


@pytest.fixture
def _books(accounts: list[Account], fork: Fork, fsync_at_once: None) -> None:
    """Make reports of two accounts in two months, adjustments, a gap, open usage, joined batches, and a quarantine."""
    acme, initech = accounts
    spend(acme, "2026-09-05", 40)
    for day, end in (("2026-08-05", "2026-09-02"), ("2026-09-06", "2026-10-02")):
        spend(initech, day, 4)
        close(end)
    spend(acme, "2026-10-15", 70, key="api_key:1")
    spend(acme, "2026-10-15", 71, key="api_key:2", meter="tokens", rule=2, version=3)
    spend(initech, "2026-10-16", 9)
    for number, process in enumerate(("p1", "p2"), 2):
        bin_ = at("2026-10-15") // 10**6
        process_totals.write(
            process,
            {
                TotalKey("admitted", "acme", "api_key:1", "requests", bin_): (number, number),
                TotalKey("unanswered", "acme", "api_key:1", "requests", bin_): (number, number + 1),
                TotalKey("unanswered", "initech", "", "tokens", bin_ + 86_400): (1, 1),
            },
        )
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
    # All of this was sealed within one hour, so it becomes one batch between two ends of reports.
    ShardState.objects.update(watermark=at("2027-01-01"))
    list(compact())
    ShardState.objects.update(watermark=at("2026-11-03"))
    assert Batch.objects.exclude(parts=b"").exists()
    spend(acme, "2026-11-06", 2)
    flow()
    _erased()
    adjust(-1)
    Adjustment.objects.filter(report=None).update(approval="waiting")
    get_user_model().objects.create(pk=Adjustment.objects.latest("pk").author_id + 1, username="another")
    fork(5)


def _erased() -> None:
    """Make a customer without a report, and erase it."""
    for day in ("2026-11-05", "2026-11-06"):
        spend("ada", day, 3)
        flow()
    erase(Name.objects.get(identifier="ada").customer)


@pytest.fixture
def _pushed(fsync_at_once: None) -> Iterator[None]:
    """Make deliveries of two accounts to two billing systems: accepted, waiting, skipped, and one not planned yet."""
    with ExitStack() as stack:
        fakes = {name: stack.enter_context(FAKES[name]()) for name in ("stripe", "lago")}
        pushed = {name: {**options(name, fake), "CUSTOMER": CUSTOMERS.get} for name, fake in fakes.items()}
        stack.enter_context(override_settings(RATELIMITS={**SETTINGS, "PUSH": pushed}))
        for name in ("acme", "initech", "nobody"):
            payer = account(name, included=5)
            for key in range(3):
                spend(payer, "2026-10-15", 7, key=f"api_key:{key}")
        close("2026-11-02")
        for fake in fakes.values():
            fake.now = lambda: at("2026-11-02") / 10**6
        for name in fakes:
            plan(receiver(name), moment(at("2026-11-02")))
            send(receiver(name), moment(at("2026-11-02")))
        for name in ("acme", "initech"):
            Adjustment.objects.filter(pk=adjust(3).pk).update(account=name)
        close("2026-11-03")
        plan(receiver("lago"), moment(at("2026-11-03")))
        assert set(PushDelivery.objects.values_list("state", flat=True)) == {"accepted", "waiting", "skipped"}
        yield


@pytest.fixture
def _terms(fsync_at_once: None) -> Iterator[None]:
    """Make priced reports of two accounts with changed terms, and two rows of each other kind of configuration."""
    with override_settings(RATELIMITS=SETTINGS):
        for name, included in (("acme", 5), ("initech", 7)):
            payer = priced(name, included=included, flat_fee=str(included))
            spend(payer, "2026-10-15", 9)
        with edit_at(0):
            for number, rule in enumerate(("day", "month")):
                Rule.objects.create(name=rule, algorithm="fixed_window", capacity=number + 1, period=86_400)
                PlanMembership.objects.create(key=f"user:{number}", plan=Plan.objects.all()[number])
                KeyOverride.objects.create(key=f"user:{number}", rule=rule, capacity=number + 7)
                Access.objects.create(target=f"user:{number + 7}", reason="abuse", status=(403, 429)[number])
        flow()
        for name, timezone in (("acme", "Europe/Berlin"), ("initech", "Asia/Kolkata")):
            change_terms("2026-10-20", name, timezone=timezone)
        declare("default", GapKind.RESTART, "before", since=at("2026-10-15"), until=at("2026-10-16"))
        close("2026-11-05")
        spend_by_terms("acme", "2026-10-15", 2)
        close("2026-11-05")
        declare("default", GapKind.RESTART, "late", since=at("2026-10-17"), until=at("2026-10-18"))
        assert FrozenPeriod.objects.count() == Report.objects.filter(version=1).count() == 2
        assert GapChange.objects.count() == 1
        yield


def findings(manifests: Iterable[Any], archives: Iterable[Path]) -> Generator[str]:
    try:
        with closing(Verification(manifests=list(manifests), archives=list(archives)).findings()) as found:
            yield from found
    except ArchiveError as error:
        yield str(error)


def weakest(manifests: list[Any], archives: list[Path]) -> str:
    """Return the least with which the change is seen, judged by what the findings are about."""
    found = set()
    for finding in findings(manifests, archives):
        means = "manifest" if "manifest of" in finding else "key" if "signature" in finding else "database"
        if means == "database" or "is not compacted" in finding:
            return "database"
        found.add(means)
    return " or ".join(sorted(found)) or UNSEEN


def weakest_of_all(manifests: list[Any], archives: list[Path]) -> str:
    """Return the same by trying each one, and check that what is seen with less is also seen with more."""
    seen = {}
    for name, (key, manifest) in MEANS.items():
        settings_then = {**settings.RATELIMITS, **({} if key else {"SIGNING_KEY": ""})}
        given = manifests if manifest else ()
        with override_settings(RATELIMITS=settings_then), closing(findings(given, archives)) as found:
            seen[name] = any(found)  # the first one will do
    assert not (seen["database"] and not all(seen.values()))
    assert seen["key and manifest"] == any(seen.values())
    if seen["database"]:
        return "database"
    return " or ".join(name for name in ("key", "manifest") if seen[name]) or UNSEEN


def seen_with(damage: Damage, manifests: list[Any], archives: list[Path], *, full: bool) -> str:
    """Make the change, return the least with which it is seen, and undo it."""
    with transaction.atomic():
        try:
            with transaction.atomic():
                damage()
                connection.check_constraints()
        except DatabaseError:
            return REFUSED
        except NotApplicableError:
            return NOTHING
        found = weakest(manifests, archives)
        assert not full or found == weakest_of_all(manifests, archives)
        transaction.set_rollback(True)
    return found


def outcomes(kinds: Mapping[str, Damage], archives: list[Path], *, full: bool) -> dict[str, str]:
    """Return for each kind of tampering the least with which it is seen, or that it is refused or does not
    apply.
    """
    manifests = [parse(json.dumps(build("default", month))) for month in MONTHS]
    assert list(findings(manifests, archives)) == []
    found = {name: seen_with(damage, manifests, archives, full=full) for name, damage in kinds.items()}
    counts = ", ".join(f"{means} {count}" for means, count in Counter(found.values()).most_common())
    print(f"\n{len(kinds)} kinds of tampering, with or without the key and manifests; seen with: {counts}")
    return found


def listed() -> dict[str, str]:
    """Return what the page says about the kinds that the database alone does not show."""
    section = PAGE.split("| table | change | what finds it |\n|---|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for table, done, means in re.findall(r"^\|(?: `(\w+)`)? \| (.*?) \| (.*?) \|$", section, re.MULTILINE):
        did, _colon, columns = done.partition(": ")
        names = [f"{table}.{column} {did}" for column in re.findall(r"`(\w+)`", columns)]
        found.update(dict.fromkeys(names or [f"{table} {did}".strip()], UNSEEN if means == "nothing" else means))
    return found


def tried(kinds: dict[str, Damage], *, long_run: bool, every: bool = True) -> int:
    """Check what the page says about these kinds, or about a sample; return how many were possible.

    A sample contains all kinds that the page lists, or with `every` false only some of them.
    """
    page = {name: means for name, means in listed().items() if name in kinds}
    others = sorted(kinds.keys() - page.keys())
    if not (every or long_run):
        page = {name: page[name] for name in Random(7).sample(sorted(page), 6)}
    names = set(kinds) if long_run else {*page, *Random(7).sample(others, len(others) // 16)}
    found = outcomes({name: kinds[name] for name in sorted(names)}, [], full=long_run)
    done = {name: means for name, means in found.items() if means not in (REFUSED, NOTHING)}
    assert done == {name: page.get(name, "database") for name in done}
    assert page.keys() <= done.keys()
    return len(done)


def test_the_page_lists_nothing_that_is_not_tried() -> None:
    assert listed().keys() <= {*TAMPERINGS, *OF_PUSHING, *OF_TERMS}


@pytest.mark.usefixtures("_books")
def test_every_tampering_is_seen_and_the_page_says_with_what(long_run: bool) -> None:
    assert tried(TAMPERINGS, long_run=long_run, every=connection.vendor == "sqlite") >= (200 if long_run else 1)


@pytest.mark.usefixtures("_pushed")
def test_every_tampering_with_what_is_pushed_is_seen(long_run: bool) -> None:
    assert tried(OF_PUSHING, long_run=long_run, every=False) >= (30 if long_run else 1)


@pytest.mark.usefixtures("_terms")
def test_every_tampering_with_the_configuration_that_bills_is_seen(long_run: bool) -> None:
    assert tried(OF_TERMS, long_run=long_run, every=False) >= (100 if long_run else 1)


@pytest.mark.usefixtures("_terms")
def test_every_tampering_with_the_history_of_the_configuration_is_seen_with_the_manifest(long_run: bool) -> None:
    names = sorted(OF_HISTORY) if long_run else Random(7).sample(sorted(OF_HISTORY), 8)
    found = outcomes({name: OF_HISTORY[name] for name in names}, [], full=long_run)
    assert set(found.values()) <= {"database", "manifest", REFUSED, NOTHING}, found


@pytest.mark.usefixtures("_books")
def test_every_tampering_with_what_was_archived_is_seen_with_the_archive_at_hand(
    tmp_path: Path, long_run: bool, django_db_blocker: DjangoDbBlocker
) -> None:
    for month in ("2026-09", "2026-10"):
        call_command("ratelimits_archive", tmp_path, before=month, stdout=io.StringIO())
    with django_db_blocker.unblock():  # an archive opens its own database
        found = outcomes(OF_ARCHIVES, archive.files(tmp_path), full=long_run)
    assert ArchivedRange.objects.exists()
    assert {name: means for name, means in found.items() if means not in ("database", NOTHING)} == dict.fromkeys(
        ("ArchivedRange.archived_at changed", "ArchivedRange.archived_at exchanged"), "manifest"
    )


def test_each_table_of_usage_and_each_column_is_tampered_with() -> None:
    known = {model.__name__ for model in TABLES} | NOTES | OTHER_TABLES
    tables = {model.__name__ for model in own_models()}
    assert tables - known == set()


@pytest.mark.usefixtures("_books")
def test_a_manifest_that_was_changed_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "2026-10.json"
    call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=io.StringIO())
    changed = json.loads(path.read_text())
    changed["reports"].popitem()
    assert any("was changed after it was written" in finding for finding in findings([changed], []))
    with pytest.raises(CommandError, match="could not be written"):
        call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=io.StringIO())
