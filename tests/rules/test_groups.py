"""Test rules for the members of a group: who is a member, and when a change of the members is in force."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.test import TestCase

from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.quota.checking import check
from ratelimits.rules import groups
from ratelimits.rules.loader import Loader
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)


def user(name: str = "ann", *names: str) -> Identity:
    row = get_user_model().objects.create(username=name)
    row.groups.set([Group.objects.get_or_create(name=group)[0] for group in names])
    return Identity(user=f"user:{row.pk}", account=f"account:{row.pk}", address="ip:203.0.113.9")


def names(loader: Loader, identity: Identity) -> list[str]:
    return [one.name for one in loader.reload().applicable("*", "GET", identity)]


@pytest.fixture(autouse=True)
def staff() -> Group:
    group = Group.objects.create(name="staff")
    rule("crew", group="staff")
    return group


def test_a_rule_applies_to_the_members_of_its_group_alone(loader: Loader) -> None:
    ann, bob = user("ann", "staff", "others"), user("bob", "others")
    assert [names(loader, one) for one in (ann, bob, Identity(address="ip:203.0.113.9"))] == [["crew"], [], []]


def test_the_groups_of_a_user_are_read_once(loader: Loader, queries: list[str]) -> None:
    ann = user("ann", "staff")
    snapshot = loader.reload()
    del queries[:]
    for method in ("GET", "POST", "PUT"):
        assert snapshot.applicable("*", method, ann)
    assert len([sql for sql in queries if "user_groups" in sql]) == 1


def test_without_a_rule_for_a_group_nobodys_groups_are_read(loader: Loader, queries: list[str]) -> None:
    ann = user("ann", "staff")
    rule("everyone")
    Rule.objects.filter(name="crew").delete()
    assert names(loader, ann) == ["everyone"]
    assert [sql for sql in queries if "user_groups" in sql] == []


@pytest.mark.parametrize("change", ["add", "remove", "clear", "add_reverse", "clear_reverse", "rename", "delete"])
def test_a_change_of_members_is_in_force_at_the_next_decision(loader: Loader, staff: Group, change: str) -> None:
    ann, bob = user("ann", "staff"), user("bob")
    assert (names(loader, ann), names(loader, bob)) == (["crew"], [])
    ann_row, bob_row = (get_user_model().objects.get(username=name) for name in ("ann", "bob"))
    changes: dict[str, Callable[[], object]] = {
        "add": lambda: bob_row.groups.add(staff),
        "remove": lambda: ann_row.groups.remove(staff),
        "clear": ann_row.groups.clear,
        "add_reverse": lambda: staff.user_set.add(bob_row),
        "clear_reverse": staff.user_set.clear,
        "rename": Group(pk=staff.pk, name="crew").save,
        "delete": staff.delete,
    }
    changes[change]()
    after = {"add": (1, 1), "add_reverse": (1, 1)}.get(change, (0, 0))
    assert (len(names(loader, ann)), len(names(loader, bob))) == after


def test_another_process_hears_of_it_from_redis() -> None:
    ann = user("ann")
    assert check(ann).decision is None or not check(ann).binding
    get_user_model().objects.get(username="ann").groups.add(Group.objects.get(name="staff"))
    binding = check(ann).binding
    assert binding is not None
    assert binding.name == "crew"


def test_the_number_of_users_in_memory_is_bounded(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_USERS", 2)
    ann, bob, eve = user("ann", "staff"), user("bob"), user("eve", "staff")
    assert [len(names(loader, one)) for one in (ann, bob, eve, ann, bob)] == [1, 0, 1, 1, 0]
    assert len(loader.current().rows.groups) <= 2


class TestInATestCase(TestCase):
    def test_a_new_member_is_seen_in_the_same_transaction(self) -> None:
        Group.objects.get_or_create(name="staff")
        ann = user("ann")
        assert check(ann).binding is None
        get_user_model().objects.get(username="ann").groups.add(Group.objects.get(name="staff"))
        binding = check(ann).binding
        assert binding is not None


def test_only_the_name_of_a_user_has_its_groups() -> None:
    user = get_user_model().objects.create(username="ann")
    user.groups.add(Group.objects.get_or_create(name="staff")[0])
    others = [
        f"user:0{user.pk}",
        f"user: {user.pk}",
        f"user:+{user.pk}",
        "user:" + "9" * 30,
        f"user:auth.group:{user.pk}",
    ]
    found = groups.read([f"user:{user.pk}", *others])
    assert found == {f"user:{user.pk}": {"staff"}, **dict.fromkeys(others, frozenset())}
