"""Whatever is changed in the tables of the ledger and the reports, `ratelimits_verify` sees it.

`pytest tests/reports/test_tampering.py --long -s` tries all kinds of tampering, and prints how many are seen with what;
without `--long` those that need the key or a manifest are tried, and a sample of the others.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from ratelimits.models import Account, ArchivedRange, Batch, ShardState
from ratelimits.reports.manifest import build, parse
from ratelimits.reports.verification import Verification
from ratelimits.usage import archive, totals
from ratelimits.usage.archive import ArchiveError
from ratelimits.usage.compact import compact
from ratelimits.witness import Place
from tests.reports.invoices import account, close, spend
from tests.reports.tampering import OF_ARCHIVES, TABLES, TAMPERINGS, Damage, NotApplicableError
from tests.reports.test_close import adjust
from tests.reports.test_verify import SIGNED
from tests.usage.quarantine import Fork
from tests.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("_books")]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "billing.md").read_text()
MONTHS = ("2026-09", "2026-10")
#: What is at hand beside the database: the signing key, the manifests.
MEANS = {"database": (False, False), "key": (True, False), "manifest": (False, True), "key and manifest": (True, True)}
SETTINGS = {**SIGNED, "RECEIPT_TTL": 10 * 365 * 86_400, "SHARDS": 4}
REFUSED, NOTHING, UNSEEN = "refused by the database", "not applicable", "unseen"
#: Tables of the app that hold no usage and no report: what is configured, and what was told to whom.
OTHER_TABLES = {
    *(
        "Account",
        "Plan",
        "PlanInclusion",
        "PlanMembership",
        "PlanPrice",
        "KeptPeriod",
        "Rule",
        "KeyOverride",
        "NetworkRule",
    ),
    *("ConfigVersion", "Tombstone", "Alert", "AlertChannel", "AlertDelivery", "AlertState"),
    *("PushReceiver", "PushedReport", "PushDelivery", "GapChange"),
}


@pytest.fixture
def accounts() -> Iterator[list[Account]]:
    """Two, in two time zones, made before anything is counted: an edit in a test changes the names of keys."""
    with override_settings(RATELIMITS=SETTINGS):
        yield [account(included=100), account("initech", timezone="Europe/Berlin")]


@pytest.fixture
def _books(accounts: list[Account], fork: Fork, fsync_at_once: None) -> None:
    """Reports of two accounts in two months, adjustments, a gap, open usage, joined batches, and a quarantine."""
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
        totals.write(
            process,
            {
                Place("admitted", "acme", "api_key:1", "requests", bin_): (number, number),
                Place("unanswered", "acme", "api_key:1", "requests", bin_): (number, number + 1),
                Place("unanswered", "initech", "", "tokens", bin_ + 86_400): (1, 1),
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
    # What was sealed within one hour, as all of this was, becomes one batch between the ends of reports.
    ShardState.objects.update(watermark=at("2027-01-01"))
    list(compact())
    ShardState.objects.update(watermark=at("2026-11-03"))
    assert Batch.objects.exclude(parts=b"").exists()
    spend(acme, "2026-11-06", 2)
    flow()
    fork(5)


def findings(manifests: Iterable[Any], archives: Iterable[Path]) -> Iterator[str]:
    try:
        with closing(Verification(manifests=list(manifests), archives=list(archives)).findings()) as found:
            yield from found
    except ArchiveError as error:
        yield str(error)


def weakest(manifests: list[Any], archives: list[Path]) -> str:
    """Return with what it is seen, told by what the findings are about."""
    found = set()
    for finding in findings(manifests, archives):
        means = "manifest" if "manifest of" in finding else "key" if "signature" in finding else "database"
        if means == "database" or "is not a compacted one" in finding:
            return "database"
        found.add(means)
    return " or ".join(sorted(found)) or UNSEEN


def weakest_of_all(manifests: list[Any], archives: list[Path]) -> str:
    """Return the same by trying each of the means, and hold that what is seen with less is seen with more."""
    seen = {}
    for name, (key, manifest) in MEANS.items():
        with override_settings(RATELIMITS=SETTINGS if key else {**SETTINGS, "SIGNING_KEY": ""}):
            seen[name] = any([*findings(manifests if manifest else (), archives)])
    assert not (seen["database"] and not all(seen.values()))
    assert seen["key and manifest"] == any(seen.values())
    if seen["database"]:
        return "database"
    return " or ".join(name for name in ("key", "manifest") if seen[name]) or UNSEEN


def seen_with(damage: Damage, manifests: list[Any], archives: list[Path], *, full: bool) -> str:
    """Do it, return with what it is seen, and undo it."""
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
    """Return with what each kind of tampering is seen; of one that the database refuses, or that is none, that."""
    manifests = [parse(json.dumps(build("default", month))) for month in MONTHS]
    assert list(findings(manifests, archives)) == []
    found = {name: seen_with(damage, manifests, archives, full=full) for name, damage in kinds.items()}
    counts = ", ".join(f"{means} {count}" for means, count in Counter(found.values()).most_common())
    print(f"\n{len(kinds)} kinds of tampering, with or without the key and manifests; seen with: {counts}")
    return found


def listed() -> dict[str, str]:
    """Return what the page says of the kinds that are not seen with the database alone."""
    section = PAGE.split("| table | what is done | seen with |\n|---|---|---|\n")[1].split("\n\n")[0]
    found = {}
    for table, done, means in re.findall(r"^\|(?: `(\w+)`)? \| (.*?) \| (.*?) \|$", section, re.MULTILINE):
        did, _colon, columns = done.partition(": ")
        names = [f"{table}.{column} {did}" for column in re.findall(r"`(\w+)`", columns)]
        found.update(dict.fromkeys(names or [f"{table} {did}".strip()], means))
    return found


def test_every_tampering_is_seen_and_the_page_says_with_what(long_run: bool) -> None:
    page = listed()
    assert page.keys() <= TAMPERINGS.keys()
    others = sorted(TAMPERINGS.keys() - page.keys())
    names = set(TAMPERINGS) if long_run else {*page, *Random(7).sample(others, len(others) // 16)}
    found = outcomes({name: TAMPERINGS[name] for name in sorted(names)}, [], full=long_run)
    done = {name: means for name, means in found.items() if means not in (REFUSED, NOTHING)}
    assert done == {name: page.get(name, "database") for name in done}
    assert page.keys() <= done.keys()
    if long_run:
        assert len(done) >= 200


def test_every_tampering_with_what_was_archived_is_seen_with_the_archive_at_hand(
    tmp_path: Path, long_run: bool, django_db_blocker: DjangoDbBlocker
) -> None:
    for month in ("2026-09", "2026-10"):
        call_command("ratelimits_archive", tmp_path, before=month, stdout=io.StringIO())
    with django_db_blocker.unblock():  # an archive is a database of its own
        found = outcomes(OF_ARCHIVES, archive.files(tmp_path), full=long_run)
    assert ArchivedRange.objects.exists()
    assert set(found.values()) <= {"database", NOTHING}


def test_each_table_of_usage_and_each_column_is_tampered_with() -> None:
    known = {model.__name__ for model in TABLES} | OTHER_TABLES
    tables = {model.__name__ for model in apps.get_app_config("ratelimits").get_models()}
    assert {name for name in tables - known if not name.startswith("Historical")} == set()
    assert ShardState in TABLES


def test_a_manifest_that_was_changed_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "2026-10.json"
    call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=io.StringIO())
    changed = json.loads(path.read_text())
    changed["reports"].popitem()
    assert any("was changed after it was written" in finding for finding in findings([changed], []))
    with pytest.raises(CommandError, match="could not be written"):
        call_command("ratelimits_manifest", "2026-10", output=path, stdout=io.StringIO(), stderr=io.StringIO())
