"""Test whom a rule meets: the keys of the ledger's last day, and those that are above it, in Redis or by the ledger."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits.algorithms.limits import Limit
from ratelimits.engine.decide import decide
from ratelimits.models import Account, Plan, PlanMembership, Rule
from ratelimits.usage.admin.affected import MAX_KEYS, Affected, affected
from ratelimits.usage.models import Line
from tests.admin.test_rules import BUCKET, RULES, errors
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db

MODULE = affected.__module__
#: A moment at the start of a bin and of an hour.
NOW = 1_800_000_000 // 86_400 * 86_400 + 43_200
_ids = itertools.count(1)


def use(key: str, units: int, *, ago: int = 0, account: str = "", meter: str = "requests") -> Line:
    counts = {
        f"{kind}_{of}": 0 for kind in ("admitted", "denied", "refunded", "shadow") for of in ("requests", "units")
    }
    counts["admitted_units"] = units
    given: dict[str, Any] = {**counts, "rule": 0, "version": 0, "checksum": 0, "batch_id": 1}
    return Line(id=next(_ids), key=key, account=account, meter=meter, bin=NOW - ago, **given)


def used(*lines: Line) -> None:
    Line.objects.bulk_create(lines)


def found(row: Rule) -> tuple[int, int | None]:
    result = affected(row, row.to_algorithm(), NOW)
    return result.count, result.above_limit


class TestByTheLedger:
    def test_keys_of_the_last_day_that_used_the_meter_are_counted(self) -> None:
        used(
            use("user:1", 5),
            use("user:1", 5, ago=900),
            use("api_key:2", 5, ago=80_000),
            use("user:3", 5, ago=90_000),
            use("user:4", 5, meter="tokens"),
        )
        assert found(unsaved()) == (2, 0)
        assert found(unsaved(key_kind="user")) == (1, 0)
        assert found(unsaved(key_kind="global")) == (1, 0)

    def test_above_are_those_that_used_more_than_it_can_have_admitted(self) -> None:
        # In a bin of 15 minutes, 5 per second with bursts to 10 admits at most 4510.
        used(use("user:1", 4_510), use("user:2", 4_511))
        assert found(unsaved()) == (2, 1)
        assert found(unsaved(algorithm="fixed_window", capacity=100)) == (2, 2)
        assert found(unsaved(algorithm="fixed_window", capacity=10_000)) == (2, 0)

    def test_a_calendar_window_is_compared_with_its_current_window(self) -> None:
        used(use("user:1", 60, ago=3_600), use("user:1", 41), use("user:2", 200, ago=46_800))
        day = unsaved(algorithm="calendar_window", calendar_unit="day", capacity=100)
        assert found(day) == (2, 1)

    def test_accounts_are_counted_once_and_have_the_sum_of_their_keys(self) -> None:
        used(use("user:1", 60, account="a"), use("user:2", 60, account="a"), use("user:3", 60))
        day: dict[str, Any] = {"algorithm": "calendar_window", "calendar_unit": "day", "capacity": 100}
        assert found(unsaved(key_kind="account", **day)) == (1, 1)
        assert found(unsaved(key_kind="user", **day)) == (3, 0)
        row = unsaved(key_kind="account", **(day | {"capacity": 200}))
        said = "Applies to 1 account of the last 24 hours. 0 of these accounts are above the limit now."
        assert affected(row, row.to_algorithm(), NOW).text == said

    def test_a_user_with_api_keys_is_one_user_with_all_their_usage(self, settings: Any) -> None:
        used(
            use("user:1", 3_000, account="1"),
            use("api_key:7", 3_000, account="1"),
            use("api_key:8", 5, account="2"),
            use("api_key:9", 5, account="api_key:9"),
        )
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
        # 5 per second with bursts to 10 admits at most 4510 in a bin.
        assert found(unsaved(key_kind="user")) == (2, 1)
        assert found(unsaved(key_kind="caller")) == (3, 1)
        assert found(unsaved(key_kind="caller", callers="authenticated")) == (3, 1)
        assert found(unsaved(key_kind="api_key")) == (3, 0)
        team = Group.objects.create(name="team")
        User.objects.create(pk=2, username="ann").groups.add(team)
        assert (
            found(unsaved(key_kind="api_key", group="team")) == found(unsaved(key_kind="user", group="team")) == (1, 0)
        )
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "2"}
        # Accounts are perhaps no users, so the users of two API keys are not known.
        row = unsaved(key_kind="user")
        assert "Applies to at least 1 key" in affected(row, row.to_algorithm(), NOW).text

    def test_requests_that_the_ledger_does_not_name_can_be_of_more_keys(self, settings: Any) -> None:
        used(use("user:1", 5, account="1"), use("anonymous", 5))
        said = {"more": "Applies to at least 1 key", "all": "Applies to 1 key"}

        def text(**fields: Any) -> str:
            row = unsaved(**fields)
            return affected(row, row.to_algorithm(), NOW).text.split(" of the")[0]

        for accounts in (None, lambda request: None):
            settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": accounts}
            unnamed = "all" if accounts is None else "more"
            assert text(key_kind="caller") == said["more"]
            assert text(key_kind="caller", callers="authenticated") == said[unnamed]
            assert text(key_kind="user") == said[unnamed]
            assert text(key_kind="global") == said["all"]

    def test_what_the_ledger_does_not_keep_is_not_guessed(self) -> None:
        used(use("user:1", 5))
        assert found(unsaved(scope="search")) == (1, None)
        assert found(unsaved(algorithm="concurrency")) == (1, None)
        row = unsaved(key_kind="ip")
        assert "does not name the keys" in affected(row, row.to_algorithm(), NOW).text

    def test_only_those_whose_plan_has_this_rule_are_counted(self) -> None:
        pro, free = (Plan.objects.create(name=slug, slug=slug) for slug in ("pro", "free"))
        rule(plan=pro)
        PlanMembership.objects.create(key="user:1", plan=pro)
        PlanMembership.objects.create(key="user:2", plan=free)
        PlanMembership.objects.create(key="user:5", plan=pro, valid_until="2020-01-01T00:00Z")
        Account.objects.create(identifier="a", plan=pro)
        used(*(use(f"user:{number}", 5) for number in (1, 2, 3, 5)), use("user:4", 5, account="a"))
        assert found(Rule.objects.get()) == (2, 0)
        assert found(unsaved()) == (3, 0)
        assert found(unsaved("other")) == (5, 0)
        assert found(unsaved(plan=free)) == (1, 0)

    def test_the_queries_are_few_and_the_keys_bounded(self) -> None:
        pro = Plan.objects.create(name="pro", slug="pro")
        row = rule(plan=pro)
        for count in (1, MAX_KEYS + 5):
            used(*(use(f"user:{number}", 1) for number in range(count)))
            PlanMembership.objects.bulk_create(
                PlanMembership(key=f"user:{number}", plan=pro) for number in range(count) if count > 1
            )
            with CaptureQueriesContext(
                connection,
            ) as queries:
                result = affected(row, row.to_algorithm(), NOW)
            assert len(queries) <= 5
        assert (result.count, result.has_more) == (MAX_KEYS, True)
        assert "at least 2,000 keys" in result.text

    def test_keys_may_be_missing_if_lines_or_keys_were_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        used(
            use("user:1", 5, account="c"),
            use("user:1", 5, ago=900, account="c"),
            use("user:2", 5, ago=1_800, account="b"),
            use("user:3", 5, account="a"),
            use("user:4", 5, ago=2_700),
        )

        def text(row: Rule) -> str:
            return affected(row, row.to_algorithm(), NOW).text

        account = unsaved(key_kind="account")
        monkeypatch.setattr(MODULE + ".MAX_LINES", 2)
        assert "at least 2 keys" in text(unsaved())
        assert "at least 2 accounts of" in text(account)
        assert "Applies to 1 key of" in text(unsaved(key_kind="global"))
        monkeypatch.setattr(MODULE + ".MAX_LINES", 50)
        monkeypatch.setattr(MODULE + ".MAX_KEYS", 2)
        # The keys that were left out can belong to other accounts.
        assert "at least 2 accounts of" in text(account)
        monkeypatch.setattr(MODULE + ".MAX_KEYS", 3)
        assert "Applies to 3 accounts" in text(account)
        monkeypatch.setattr(MODULE + ".MAX_KEYS", 4)
        assert "Applies to 4 keys" in text(unsaved())


class TestInRedis:
    def test_a_saved_rule_is_asked_of_its_counters(self) -> None:
        row = rule("daily", "fixed_window", capacity=100, period=86_400)
        used(use("user:1", 1), use("user:2", 1, account="a"))
        decide([Limit("user:1", row.to_algorithm(), "daily", 70)])
        decide([Limit("user:2", row.to_algorithm(), "daily", 30)])
        assert found(row) == (2, 0)
        row.capacity = 50
        assert found(row) == (2, 1)
        row.capacity = 30
        result = affected(row, row.to_algorithm(), NOW)
        assert result == Affected(2, 2, False, True)
        assert result.text == "Applies to 2 keys of the last 24 hours. Everyone would be refused."
        # Asking took nothing.
        row.capacity = 71
        assert found(row) == (2, 0)

    def test_another_algorithm_starts_anew(self) -> None:
        row = rule("daily", "fixed_window", capacity=100, period=86_400)
        used(use("user:1", 1))
        decide([Limit("user:1", row.to_algorithm(), "daily", 70)])
        row.algorithm, row.capacity = "sliding_log", 50
        assert found(row) == (1, 0)


@pytest.mark.parametrize("key_kind", ["ip", "view_key", "caller"])
def test_a_closed_rule_for_a_group_does_not_refuse_everyone(key_kind: str) -> None:
    used(use("user:1", 1))
    for group, refuses_everyone in (("", True), ("staff", False)):
        row = unsaved("fixed_window", capacity=0, period=60, key_kind=key_kind, group=group)
        assert affected(row, row.to_algorithm(), NOW).refuses_everyone is refuses_everyone


class TestTheSecondClick:
    def test_it_is_asked_where_everyone_would_be_refused(self, admin_client: Client) -> None:
        row = rule("burst", key_kind="api_key")
        closed = {**BUCKET, "capacity": "0", "initial": "full"}
        url = f"{RULES}{row.pk}/change/"
        response = admin_client.post(url, closed)
        said = errors(response)["__all__"]
        assert "Everyone would be refused." in said
        button = '<button type="submit" class="button" name="_everyone_meant" value="1">'
        assert button in response.content.decode()
        row.refresh_from_db()
        assert row.capacity == 10
        assert admin_client.post(url, {**closed, "_everyone_meant": "1"}).status_code == 302
        row.refresh_from_db()
        assert row.capacity == 0
        # It is not asked again for what changes nothing for anyone.
        assert admin_client.post(url, {**closed, "on_failure": "deny"}).status_code == 302

    @pytest.mark.parametrize("mode", ["shadow", "off"])
    def test_it_is_not_asked_for_what_refuses_nobody(self, admin_client: Client, mode: str) -> None:
        response = admin_client.post(RULES + "add/", {**BUCKET, "capacity": "0", "mode": mode})
        assert response.status_code == 302
