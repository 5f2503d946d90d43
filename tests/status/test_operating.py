"""Test the command that shows, resets, grants, blocks and unblocks, and what it stands on."""

from __future__ import annotations

import io
import time
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command

from ratelimits import moments
from ratelimits.embedded import free_port
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, KeyOverride, KeyReset, Plan
from ratelimits.models.keys import key_name
from ratelimits.quota import checking, from_memory
from ratelimits.rules.grants import grant, planned
from ratelimits.status.operating import NothingDoneError, identity_of, reset
from ratelimits.usage.counting import access
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import DAY, SUMS, newest_days
from tests.support.entry_points import Clock, away, begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", None, "account:1", None)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Clock:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    access.clear()
    return begin_afresh(monkeypatch)


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("ratelimits_key", *arguments, stdout=out, stderr=out)
    return out.getvalue()


def refused(*arguments: str) -> tuple[str, int]:
    with pytest.raises(CommandError) as error:
        run(*arguments)
    return str(error.value), error.value.returncode


def spend(who: Identity = WHO, **more: Any) -> list[bool]:
    from_memory.denials.clear()
    return [checking.check(who, **more).allowed for _ in range(3)]


def used_by(key: str, *accounts: str) -> None:
    """Let accounts have used a key yesterday."""
    for account in accounts:
        subject = {"account": account, "key": key, "rule": 0, "meter": "requests"}
        start = newest_days(time.time(), 2)[1]
        KeyTotal.objects.create(span=DAY, start=start, **subject, **dict.fromkeys(SUMS, 1))


class TestShowAndReset:
    def test_a_key_gets_its_permits_back_under_one_rule_and_the_reset_is_recorded(self, settings: Any) -> None:
        User.objects.create(username="ann")
        used_by("user:1", "1")
        for name in ("minute", "day"):
            rule(name, "fixed_window", capacity=2, period=86_400, key_kind="user")
        assert spend() == [True, True, False]
        assert "minute (enforce), counted for user:1: 0 of 2 requests left" in run("show", "user:1")
        assert run("reset", "user:1", "minute", "--reason", "asked", "--by", "ann").startswith("user:1 has all")
        shown = run("show", "user:1")
        assert "day (enforce), counted for user:1: 0 of 2" in shown
        assert "minute (enforce), counted for user:1: 2 of 2" in shown
        row = KeyReset.objects.get()
        assert (row.key, row.account, row.rule, row.reason, str(row.by)) == ("user:1", "1", "minute", "asked", "ann")
        run("reset", "user:1", "day", "--reason", "asked")
        assert spend() == [True, True, False]

    def test_every_scope_and_kind_of_key_is_found(self) -> None:
        rule("search", "fixed_window", capacity=2, key_kind="api_key", scope="search:POST")
        rule("payer", "concurrency", capacity=2, key_kind="account")
        rule("place", "sliding_log", capacity=2, key_kind="ip")
        who = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
        assert spend(who, scope="search", method="POST") == [True, True, False]
        used_by("api_key:9", "acme")
        assert "account: acme" in run("show", "api_key:9")
        assert "0 of 2" in run("show", "api_key:9")
        for key, name in (("api_key:9", "search"), ("account:acme", "payer"), ("ip:203.0.113.9", "place")):
            run("reset", key, name, "--reason", "r")
        assert spend(who, scope="search", method="POST") == [True, True, False]

    def test_a_key_that_a_view_gives_is_typed_as_people_write_it(self) -> None:
        window: dict[str, Any] = {"capacity": 2, "period": 86_400, "key_kind": "view_key"}
        rule("tenant", "fixed_window", view_key="header:X-Tenant", **window)
        rule("page", "fixed_window", view_key="arg:pk", **window)
        key = "header:X-Tenant=acme"
        who = WHO._replace(view_keys=(key_name("arg:pk=7"), key_name(key)))
        assert spend(who) == [True, True, False]
        shown = run("show", "header:x-tenant= acme").splitlines()
        assert [line.partition(" left")[0] for line in shown] == [
            f"tenant (enforce), counted for {key}: 0 of 2 requests"
        ]
        assert f"{key} has all permits of tenant" in run("reset", "header:x_tenant=acme", "tenant", "--reason", "r")
        assert KeyReset.objects.get().key == key
        assert "No rule “page” counts header:X-Tenant=acme" in refused("reset", key, "page", "--reason", "r")[0]
        run("reset", "arg:pk=07", "page", "--reason", "r")
        run("grant", "header:x-tenant=acme", "tenant", "1", "--until", "1d", "--reason", "r")
        assert run("show", key).startswith(f"tenant (enforce, override), counted for {key}: 3 of 3")
        assert spend(who) == [True, True, False]  # by the rule "page"
        assert "header:X-Tenant is not a key: write where the view finds" in refused("show", "header:X-Tenant")[0]

    def test_what_cannot_be_reset_is_said_and_nothing_is_recorded(self, settings: Any) -> None:
        rule("all", "fixed_window", capacity=2, key_kind="global")
        used_by("user:1", "1")
        assert refused("reset", "user:1", "all", "--reason", "r") == (
            "No rule “all” counts user:1, so there are no permits of this key to reset.",
            1,
        )
        assert "no user “bob”" in refused("reset", "user:1", "all", "--reason", "r", "--by", "bob")[0]
        assert "write a key" in refused("show", "team:1")[0]
        away(settings, free_port())
        assert refused("show", "user:1")[1] == 3
        assert not KeyReset.objects.exists()

    def test_the_account_of_a_key_is_the_one_that_it_was_seen_with(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": "tests.status.test_operating.nobody"}
        assert identity_of("user:1", "-") == Identity("user:1")
        with pytest.raises(
            NothingDoneError, match=r"Name the account\. If the key has no account, write a hyphen \(-\)\."
        ):
            identity_of("user:1")
        used_by("user:1", "acme")
        assert identity_of("user:1").account == "account:acme"
        assert identity_of("user:1", "other").account == "account:other"
        used_by("user:2", "acme", "beta")
        with pytest.raises(NothingDoneError, match="acme, beta"):
            identity_of("user:2")

    @pytest.mark.parametrize("account", ["7", "-", "user:1"])
    def test_a_user_who_is_the_account_has_no_other_account(self, account: str, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="user")
        assert identity_of("user:1", "1") == identity_of("user:1")
        with pytest.raises(NothingDoneError, match=r"The account of user:1 is 1, .* name no account"):
            reset("user:1", "day", "a mistake", account=account)
        assert not KeyReset.objects.exists()


class TestTheKey:
    def test_a_name_stands_for_its_key_if_it_is_found_once(self) -> None:
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="account")
        Account.objects.create(identifier="c-17", name="Acme Ltd.")
        assert "day (enforce), counted for account:c-17: 2 of 2" in run("show", "acme")
        assert run("reset", "acme ltd", "day", "--reason", "r").startswith("account:c-17 has all permits")
        run("grant", "c-17", "day", "5", "--until", "2h", "--reason", "r")
        assert (KeyReset.objects.get().key, KeyOverride.objects.get().key) == ("account:c-17", "account:c-17")
        Account.objects.create(identifier="acme-2", name="")
        found = "Several keys match “acme”. Write one of them: account:acme-2, account:c-17 (Acme Ltd.)."
        assert refused("show", "acme") == (found, 1)
        assert "No key or name contains “globex”" in refused("show", "globex")[0]

    @pytest.mark.parametrize(
        "action", [("reset", "{}", "day"), ("grant", "{}", "day", "5", "--until", "2h")], ids=["reset", "grant"]
    )
    def test_a_key_or_account_that_nobody_has_is_refused(self, action: tuple[str, ...]) -> None:
        rule("day", "fixed_window", key_kind="caller")
        used_by("user:1", "1")
        for key, account, said in (
            ("user:999", "", "No user has the primary key “999”"),
            ("account:acmee", "", "No account has the identifier “acmee”"),
            ("api_key:4", "-", "No API key “4” is known"),
            ("user:1", "acmee", "No account has the identifier “acmee”"),
            ("team:1", "", "write a key"),
        ):
            arguments = [argument.format(key) for argument in action]
            assert said in refused(*arguments, "--account", account, "--reason", "r")[0]
        assert not KeyReset.objects.exists()
        assert not KeyOverride.objects.exists()


def nobody(request: Any) -> None:
    return None


class TestGrants:
    def test_more_until_a_time(self) -> None:
        rule("day", "fixed_window", capacity=2, period=86_400, key_kind="account")
        used_by("user:1", "1")
        assert spend() == [True, True, False]
        said = run("grant", "account:1", "day", "2", "--until", "2h", "--reason", "a good customer")
        assert "capacity 4" in said
        assert spend() == [True, True, False]
        row = KeyOverride.objects.get()
        assert (row.reason, row.capacity) == ("a good customer", 4)
        assert timedelta(minutes=119) < row.valid_until - moments.now() < timedelta(minutes=121)

    def test_overrides_in_force_keep_their_numbers_and_go_on_afterwards(self) -> None:
        rule(capacity=10, key_kind="user")
        now = moments.now()
        KeyOverride.objects.create(
            key="user:1", rule="burst", capacity=50, rate=7, valid_until=now + timedelta(hours=2)
        )
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=80, valid_from=now + timedelta(hours=3))
        grant("user:1", "burst", 5, now + timedelta(hours=4), "r")
        rows = KeyOverride.objects.exclude(valid_until__lte=moments.now()).order_by("valid_from")
        hours = [round((row.valid_until - now) / timedelta(hours=1)) if row.valid_until else None for row in rows]
        assert [row.capacity for row in rows] == [55, 15, 85, 80]
        assert [row.rate for row in rows] == [7, None, None, None]
        assert hours == [2, 3, 4, None]
        assert {record.history_change_reason for record in KeyOverride.history.filter(capacity=85)} == {"r"}
        grant("user:1", "burst", 1, now + timedelta(hours=1), "again")
        assert KeyOverride.objects.filter(capacity=56).count() == 1

    def test_the_number_of_the_plan_that_the_key_is_on(self) -> None:
        pro = Plan.objects.create(name="Pro", slug="pro")
        Account.objects.create(identifier="acme", plan=pro)
        rule("day", "fixed_window", capacity=2, key_kind="account")
        rule("day", "fixed_window", capacity=100, key_kind="account", plan=pro)
        soon = moments.now() + timedelta(hours=1)
        assert [planned(f"account:{name}", "day", 5, soon)[0].capacity for name in ("acme", "other")] == [105, 7]
        assert planned("user:3", "day", 5, soon, account="acme")[0].capacity == 105

    @pytest.mark.parametrize(
        ("key", "name", "extra", "hours", "said"),
        [
            ("user:1", "none", 1, 1, "No rule has the name “none”"),
            ("user:1", "smooth", 1, 1, "smooth has no capacity: override"),
            ("user:1", "day", 0, 1, "1 or more"),
            ("user:1", "day", 1, -1, "in the future"),
            ("user:1", "place", 1, 1, "counts per address"),
            ("user:1", "gold", 1, 1, "belong to plans"),
            ("team:1", "day", 1, 1, "not a key"),
        ],
    )
    def test_what_cannot_be_granted(self, key: str, name: str, extra: int, hours: int, said: str) -> None:
        rule("smooth", "smooth_bursty", key_kind="user", max_wait=1)
        rule("day", "fixed_window", key_kind="user")
        rule("place", "fixed_window", key_kind="ip")
        rule("gold", "fixed_window", key_kind="user", plan=Plan.objects.create(name="Gold", slug="gold"))
        with pytest.raises(ValidationError) as error:
            grant(key, name, extra, moments.now() + timedelta(hours=hours), "r")
        assert said in str(error.value.messages)
        assert not KeyOverride.objects.exists()


class TestBlocking:
    def test_a_network_is_blocked_and_unblocked(self) -> None:
        who = Identity(address="ip:203.0.113.9")
        assert run(
            *(
                "block",
                "203.0.113.0/24",
                "--reason",
                "scan",
                "--until",
                "1 day",
                "--status",
                "429",
                "--message",
                "Stop.",
            )
        ).startswith("block ip:203.0.113.0/24, until ")
        answer = checking.check(who)
        assert answer.access is not None
        assert (answer.allowed, answer.access.status, answer.access.message) == (False, 429, "Stop.")
        assert "block ip:203.0.113.0/24" in run("show", "ip:203.0.113.9")
        assert run("unblock", "203.0.113.0/24", "--reason", "over") == "block ip:203.0.113.0/24: ended.\n"
        assert checking.check(who).allowed
        assert [one.history_change_reason for one in Access.history.order_by("history_id")] == ["scan", "over"]

    def test_a_key_is_allowed_until_a_day(self) -> None:
        rule(capacity=0)
        run("allow", "user:1", "--reason", "test", "--until", f"{moments.now() + timedelta(days=2):%Y-%m-%d}")
        assert spend() == [True] * 3

    def test_a_key_that_nobody_has_is_warned_of(self) -> None:
        Account.objects.create(identifier="acme")
        warning = "Until somebody has this key, the block or allow has no effect."
        assert warning in run("block", "account:acmee", "--reason", "r")
        assert warning not in run("block", "account:acme", "--reason", "r")
        assert set(Access.objects.values_list("target", flat=True)) == {"account:acme", "account:acmee"}

    def test_what_makes_no_sense(self) -> None:
        assert refused("unblock", "user:1", "--reason", "r") == ("No block or allow of user:1 is in force.", 1)
        assert "write 203.0.113.0/24" in refused("block", "203.0.113.1/24", "--reason", "r")[0]
        run("block", "user:1", "--reason", "r")
        assert "is in force at the same time" in refused("allow", "user:1", "--reason", "r")[0]
        assert (
            "The end is not after the start"
            in refused("block", "user:2", "--reason", "r", "--from", "2h", "--until", "1h")[0]
        )
        assert "invalid moment value: 'soon'" in refused("block", "user:2", "--reason", "r", "--until", "soon")[0]
        assert "--reason" in refused("block", "user:2")[0]


def test_a_count_of_a_network_is_reset_by_the_networks_key() -> None:
    rule("net", "fixed_window", capacity=1, key_kind="ip", ipv4_prefix=24, ipv6_prefix=56)
    for address, key in (("ip:203.0.113.9", "ip:203.0.113.0/24"), ("ip:2001:db8:1:2ff::/64", "ip:2001:db8:1:200::/56")):
        who = Identity(address=address)
        assert spend(who) == [True, False, False]
        run("reset", key, "net", "--reason", "asked")
        assert spend(who) == [True, False, False]


def test_a_count_of_an_ipv6_network_of_32_bits_is_reset_by_the_networks_key() -> None:
    rule("net", "fixed_window", capacity=1, key_kind="ip", ipv6_prefix=32)
    who = Identity(address="ip:2001:db8:1:2ff::/64")
    assert spend(who) == [True, False, False]
    run("reset", "ip:2001:db8::/32", "net", "--reason", "asked")
    assert spend(who) == [True, False, False]
