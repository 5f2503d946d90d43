"""Test rows that come from fixtures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core import serializers
from django.core.management import call_command

from ratelimits import rules
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, KeyOverride, Plan, PlanMembership, Rule, Tombstone
from ratelimits.rules.loader import Loader
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db(transaction=True)

HISTORY: Any = Rule.history


def version() -> int:
    return ConfigVersion.read("default")[0]


def load(tmp_path: Path, text: str) -> None:
    (tmp_path / "fixture.json").write_text(text, encoding="utf-8")
    call_command("loaddata", str(tmp_path / "fixture.json"), verbosity=0)


def entry(model: str, pk: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"model": f"ratelimits.{model}", **({} if pk is None else {"pk": pk}), "fields": fields}


def test_a_loaded_row_is_in_the_history(tmp_path: Path) -> None:
    row = unsaved()
    row.pk, row.version = 5, 99
    text = serializers.serialize("json", [row])
    load(tmp_path, text)
    loaded = Rule.objects.get()
    assert (loaded.version, version()) == (1, 1)
    assert loaded.since > 0
    load(tmp_path, text)
    assert version() == 1  # the same row again is not an edit
    row.capacity = 77
    load(tmp_path, serializers.serialize("json", [row]))
    records = HISTORY.order_by("version").values_list("version", "history_type", "capacity", "history_change_reason")
    assert list(records) == [(1, "+", 10, "loaddata"), (2, "~", 77, "loaddata")]
    assert Rule.as_of(5, 1).capacity == 10
    assert Rule.as_of(5, 2).capacity == 77


def test_a_row_without_a_primary_key_is_a_new_one(tmp_path: Path) -> None:
    load(tmp_path, json.dumps([entry("plan", name="Pro", slug="pro")]))
    plan = Plan.objects.get()
    assert plan.version == plan.history.get().version == version() == 1


def test_a_changed_key_leaves_the_plan_that_it_had(tmp_path: Path, loader: Loader) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    rule(plan=plan)
    row = PlanMembership.objects.create(key="user:1", plan=plan)

    def plans(key: str) -> list[str]:
        return [one.plan for one in loader.reload().applicable("*", "GET", Identity(user=key))]

    assert plans("user:1") == ["pro"]
    row.key = "user:2"
    load(tmp_path, serializers.serialize("json", [row]))
    assert Tombstone.objects.get(kind="planmembership").key == "user:1"
    assert (plans("user:1"), plans("user:2")) == ([], ["pro"])


@pytest.fixture
def loader() -> Loader:
    return Loader()


def test_a_version_is_published_when_its_row_is_there(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a deserialised object outside of any transaction."""
    rule()
    [found] = serializers.deserialize("json", serializers.serialize("json", [unsaved("other")]))
    seen: list[tuple[int, int]] = []

    def note(published: int) -> int:
        seen.append((published, Rule.objects.count()))
        loader.reload()
        return published

    monkeypatch.setattr("ratelimits.models.versions.publish_version", note)
    found.save()
    assert seen == [(2, 2)]
    assert {one.name for one in loader.current().applicable("*", "GET", Identity(user="user:1"))} == {"burst", "other"}


def test_a_dump_of_everything_brings_its_own_history(tmp_path: Path) -> None:
    first = rule(capacity=1)
    for capacity in (2, 3):
        Rule.objects.update(capacity=capacity)
    KeyOverride.objects.create(key="user:1", rule="burst", capacity=5)
    records = list(HISTORY.order_by("version").values_list("version", "history_type", "capacity"))
    before = version()
    call_command("dumpdata", "ratelimits", output=str(tmp_path / "all.json"), verbosity=0)

    call_command("flush", interactive=False, verbosity=0)
    rules.forget()
    call_command("loaddata", str(tmp_path / "all.json"), verbosity=0)
    assert list(HISTORY.order_by("version").values_list("version", "history_type", "capacity")) == records
    assert [Rule.as_of(first.pk, number).capacity for number in (1, 2, 3)] == [1, 2, 3]
    row = Rule.objects.get()
    assert row.version > before
    assert Rule.as_of(row.pk, row.version).capacity == 3
    assert version() >= row.version
    Rule.objects.update(capacity=4)
    assert Rule.as_of(row.pk, version()).capacity == 4
