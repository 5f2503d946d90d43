"""Test that a file is imported as one edit or not at all, and only as it was shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.test.utils import CaptureQueriesContext

from ratelimits.models import Account, ConfigVersion, KeyOverride, Plan, PlanMembership
from ratelimits.models.history import because
from ratelimits.row_files import (
    ChangedSinceError,
    FileEffect,
    NotImportedError,
    SeenEffect,
    comparing,
    effect_of_file,
    import_rows,
)
from ratelimits.row_files.comparing import LineState
from ratelimits.row_files.tables import TABLES, Source, read
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

Rows = list[tuple[Any, ...]]


@pytest.fixture
def plans() -> tuple[Plan, Plan]:
    return Plan.objects.create(name="Free", slug="free"), Plan.objects.create(name="Pro", slug="pro")


def source(*texts: str, model: Any = PlanMembership) -> Source:
    return read("\n".join(texts).encode(), TABLES[model])


def seen(file: Source, model: Any = PlanMembership) -> SeenEffect:
    effect, lines = effect_of_file(TABLES[model], file, "default")
    assert list(lines)
    return SeenEffect(effect.digest, effect.version)


def imported(
    file: Source, shown: SeenEffect | None = None, *, model: Any = PlanMembership, **options: Any
) -> FileEffect:
    options = {"good_only": False, "after_portion": ignore, **options}
    return import_rows(TABLES[model], file, "default", shown or seen(file, model), **options)


def ignore(new: Sequence[Any], changed: Sequence[Any]) -> None:
    pass


def rows() -> Rows:
    return list(PlanMembership.objects.values_list("key", "plan__slug", "version"))


def version() -> int:
    return ConfigVersion.read("default")[0]


def test_a_file_is_one_edit_with_one_reason(plans: tuple[Plan, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PORTION", 20)
    PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=plans[0]) for n in range(60))
    before = version()
    with because("OPS-17"):
        done = imported(source("key,plan", *(f"user:{n},pro" for n in range(120))))
    assert done.counts == {LineState.CHANGED: 60, LineState.NEW: 60}
    assert version() == before + 1
    assert {row[1:] for row in rows()} == {("pro", before + 1)}
    history: Any = PlanMembership.history
    records = history.filter(version=before + 1).values_list("history_type", "history_change_reason")
    assert sorted(records) == [("+", "OPS-17")] * 60 + [("~", "OPS-17")] * 60


def test_a_file_with_wrong_lines_changes_nothing_unless_they_are_to_be_left_out(plans: tuple[Plan, Plan]) -> None:
    texts = [f"user:{n},pro" for n in range(500)]
    for wrong in (7, 77, 477):
        texts[wrong] = f"user:{wrong},gold"
    file, before = source("key,plan", *texts), version()
    with pytest.raises(NotImportedError):
        imported(file)
    assert (rows(), version()) == ([], before)
    done = imported(file, good_only=True)
    assert (done.good, done.counts[LineState.ERROR]) == (497, 3)
    assert (len(rows()), version()) == (497, before + 1)


def test_a_file_that_changes_nothing_takes_no_version(plans: tuple[Plan, Plan]) -> None:
    file = source("key,plan", "user:1,pro")
    imported(file)
    before = version()
    assert imported(file).counts == {LineState.UNCHANGED: 1}
    assert version() == before


def test_a_row_that_was_changed_since_is_named_and_nothing_is_imported(plans: tuple[Plan, Plan]) -> None:
    PlanMembership.objects.create(key="user:1", plan=plans[0])
    row = PlanMembership.objects.create(key="user:2", plan=plans[0])
    file = source("key,plan", "user:1,pro", "user:2,pro")
    shown = seen(file)
    PlanMembership.objects.filter(pk=row.pk).update(valid_from="2025-01-01T00:00Z")  # a column that is not in the file
    before = rows(), version()
    with pytest.raises(ChangedSinceError) as raised:
        imported(file, shown)
    assert [(line.number, line.name) for line in raised.value.lines] == [(3, "user:2")]
    assert (rows(), version()) == before


@pytest.mark.parametrize("change", ["added", "deleted", "plan"])
def test_whatever_makes_a_file_do_something_else_is_noticed(plans: tuple[Plan, Plan], change: str) -> None:
    row = PlanMembership.objects.create(key="user:1", plan=plans[0])
    file = source("key,plan", "user:1,pro", "user:2,pro")
    shown = seen(file)
    if change == "added":
        PlanMembership.objects.create(key="user:2", plan=plans[1])
    elif change == "deleted":
        row.delete()
    else:
        plans[1].slug = "professional"
        plans[1].save()
    before = rows(), version()
    with pytest.raises(ChangedSinceError):
        imported(file, shown)
    assert (rows(), version()) == before


def test_an_edit_of_another_row_hinders_nobody(plans: tuple[Plan, Plan]) -> None:
    file = source("key,plan", "user:1,pro")
    shown = seen(file)
    PlanMembership.objects.create(key="user:2", plan=plans[0])
    assert imported(file, shown).good == 1


def test_a_row_gets_its_end_before_the_next_is_added(plans: tuple[Plan, Plan]) -> None:
    """Otherwise the database would refuse two rows of a key without an end."""
    header = "key,plan,valid_from,valid_until"
    imported(source(header, "user:1,free,,2126-01-01T00:00Z", "user:1,pro,2126-01-01T00:00Z,"))
    later = "user:1,pro,2126-01-01T00:00Z,2127-01-01T00:00Z"
    assert imported(source(header, "user:1,free,2127-01-01T00:00Z,", later)).good == 2
    assert len(rows()) == 3


def test_a_row_that_the_database_refuses_undoes_the_whole_file(
    plans: tuple[Plan, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "PORTION", 20)
    file, before = source("key,plan", *(f"user:{n},pro" for n in range(30))), version()

    def refuse(new: Sequence[Any], changed: Sequence[Any]) -> None:
        if len(rows()) == 30:  # the last portion: the same key once more, past all checks
            PlanMembership.objects.create(key="user:1", plan=plans[0])

    with pytest.raises(IntegrityError):
        imported(file, after_portion=refuse)
    assert (rows(), version()) == ([], before)


def test_overrides_and_accounts_are_imported_too(plans: tuple[Plan, Plan]) -> None:
    rule()
    Account.objects.create(identifier="acme")
    file = source("identifier,plan,timezone", "acme,pro,Europe/Berlin", "initech,free,UTC", model=Account)
    assert imported(file, model=Account).good == 2
    terms = Account.objects.values_list("identifier", "plan__slug", "timezone")
    assert list(terms) == [("acme", "pro", "Europe/Berlin"), ("initech", "free", "UTC")]
    file = source("key,rule,capacity", "account:acme,burst,0", "user:4,burst,7", model=KeyOverride)
    assert imported(file, model=KeyOverride).good == 2
    assert {row.key: (row.capacity, row.shard > 0) for row in KeyOverride.objects.all()} == {
        "account:acme": (0, True),
        "user:4": (7, True),
    }


def test_the_number_of_queries_of_an_import_is_that_of_its_portions(
    plans: tuple[Plan, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "PORTION", 20)
    PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=plans[0]) for n in range(0, 100, 2))

    def queries(first: int, last: int) -> int:
        file = source("key,plan", *(f"user:{n},pro" for n in range(first, last)))
        shown = seen(file)
        with CaptureQueriesContext(connection) as captured:
            imported(file, shown)
        return len(captured)

    one, two = queries(0, 20), queries(20, 60)
    assert queries(60, 62) == one
    assert two - one <= one < 40
