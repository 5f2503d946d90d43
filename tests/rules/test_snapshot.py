from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from ratelimits.algorithms.calendar import boundaries, instant
from ratelimits.algorithms.limits import Gcra, Lasting, Mode, TokenBucket
from ratelimits.identity import Identity
from ratelimits.models import Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.keys import key_name
from ratelimits.rules.loader import Loader
from ratelimits.rules.selection import AppliedRule, UnreadableRule
from tests.rules.conftest import Clock
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

ADDRESS = Identity(address="ip:203.0.113.9")
USER = Identity(user="user:1", account="account:1", address="ip:203.0.113.9")
KEY = Identity(user="user:1", api_key="api_key:9", account="account:1", address="ip:203.0.113.9")


def names(loader: Loader, identity: Identity = KEY, scope: str = "*", method: str = "GET") -> list[str]:
    return [one.name for one in loader.reload().applicable(scope, method, identity)]


def burst(loader: Loader, identity: Identity = KEY) -> AppliedRule:
    [applied] = [one for one in loader.reload().applicable("*", "GET", identity) if one.name == "burst"]
    return applied


def capacity(loader: Loader, identity: Identity = KEY) -> int:
    algorithm = burst(loader, identity).algorithm
    assert isinstance(algorithm, TokenBucket)
    return algorithm.capacity


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class TestWhatApplies:
    def test_an_applied_rule_says_all_that_a_decision_needs(self, loader: Loader) -> None:
        row = rule(meter="tokens", bills=True, on_failure="deny", max_wait=Decimal("1.5"))
        assert loader.current().applicable("search", "GET", KEY) == (
            AppliedRule(
                name="burst",
                key="user:1",
                key_kind="user",
                algorithm=TokenBucket(10, Decimal(5), Decimal(1)),
                meter="tokens",
                mode=Mode.ENFORCE,
                bills=True,
                on_failure="deny",
                max_wait=Decimal("1.5"),
                prefetch=0,
                refusal_status=429,
                refusal_text="",
                lasting=Lasting.NO,
                counts_since=row.counts_since,
                rule=row.pk,
                version=1,
                since=row.since,
                plan="",
            ),
        )

    @pytest.mark.parametrize(
        ("kind", "keys"),
        [
            ("user", [None, "user:1", "user:1"]),
            ("api_key", [None, None, "api_key:9"]),
            ("account", [None, "account:1", "account:1"]),
            ("ip", ["ip:203.0.113.9"] * 3),
            ("global", ["global"] * 3),
            ("caller", ["ip:203.0.113.9", "user:1", "user:1"]),
        ],
    )
    def test_a_rule_counts_what_the_request_has(self, loader: Loader, kind: str, keys: list[str | None]) -> None:
        rule(key_kind=kind)
        snapshot = loader.current()
        for identity, key in zip((ADDRESS, USER, KEY), keys, strict=True):
            assert [one.key for one in snapshot.applicable("*", "GET", identity)] == ([key] if key else [])

    @pytest.mark.parametrize(
        ("callers", "found"), [("everyone", [1, 1, 1]), ("anonymous", [1, 0, 0]), ("authenticated", [0, 1, 1])]
    )
    def test_a_rule_may_be_for_anonymous_or_authenticated_callers(
        self, loader: Loader, callers: str, found: list[int]
    ) -> None:
        rule(callers=callers)
        assert [len(names(loader, identity)) for identity in (ADDRESS, USER, KEY)] == found

    def test_an_account_alone_stands_for_all_its_callers(self, loader: Loader) -> None:
        rule("one", callers="anonymous", key_kind="account")
        rule("other", callers="authenticated", key_kind="account")
        assert names(loader, Identity(account="account:1")) == ["one", "other"]

    def test_keys_of_a_view_alone_stand_for_all_callers_with_them(self, loader: Loader) -> None:
        for callers in ("anonymous", "authenticated"):
            rule(callers, callers=callers, key_kind="view_key")
        assert names(loader, Identity(view_keys=(key_name("arg:pk=7"),))) == ["anonymous", "authenticated"]

    def test_a_rule_counts_the_key_that_it_names_or_the_first(self, loader: Loader) -> None:
        tenant, page = key_name("header:X-Tenant=acme"), key_name("arg:pk=7")
        rule("first", key_kind="view_key")
        rule("page", key_kind="view_key", view_key="arg:pk")
        rule("other", key_kind="view_key", view_key="arg:id")

        def counted(*view_keys: str) -> list[tuple[str, str]]:
            applied = loader.reload().applicable("*", "", USER._replace(view_keys=view_keys))
            return [(one.name, one.key) for one in applied]

        assert counted() == []
        assert counted(tenant) == [("first", tenant)]
        assert counted(page, tenant) == [("first", page), ("page", page)]
        assert counted(tenant, page) == [("first", tenant), ("page", page)]

    def test_rows_about_a_value_apply_to_the_requests_with_it(self, loader: Loader) -> None:
        rule(key_kind="user")
        plan = Plan.objects.create(name="Pro", slug="pro")
        rule(key_kind="user", capacity=20, plan=plan)
        KeyOverride.objects.create(key="arg:pk=7", rule="burst", mode="off")
        PlanMembership.objects.create(key="header:X-Tenant=acme", plan=plan)
        tenant, page, other = (key_name(key) for key in ("header:x-tenant=acme", "arg:pk=07", "arg:pk=8"))
        assert [names(loader, USER._replace(view_keys=keys)) for keys in ((tenant, page), (other,))] == [[], ["burst"]]
        assert capacity(loader, USER._replace(view_keys=(tenant, other))) == 20
        KeyOverride.objects.all().delete()
        loader.reload()
        assert names(loader, USER._replace(view_keys=(page,))) == ["burst"]

    def test_a_rule_for_all_scopes_leaves_out_those_that_it_excepts(self, loader: Loader) -> None:
        rule(except_scopes="health webhooks")
        rule("gets", scope="*:GET", except_scopes="health")
        rule("health", scope="health")
        found = [names(loader, scope=scope) for scope in ("*", "search", "health", "webhooks")]
        assert found == [["burst", "gets"], ["burst", "gets"], ["health"], ["gets"]]

    @pytest.mark.parametrize(
        ("address", "counted"),
        [
            ("ip:203.0.113.9", "ip:203.0.113.0/24"),
            ("ip:2001:db8:1:2ff::/64", "ip:2001:db8:1:200::/56"),
            ("ip:unknown", "ip:unknown"),
        ],
    )
    def test_a_rule_may_count_addresses_by_larger_networks(self, loader: Loader, address: str, counted: str) -> None:
        rule(key_kind="ip", ipv4_prefix=24, ipv6_prefix=56)
        assert burst(loader, Identity(address=address)).key == counted

    def test_one_length_leaves_the_other_as_it_is(self, loader: Loader) -> None:
        rule(key_kind="caller", ipv6_prefix=48)
        assert burst(loader, ADDRESS).key == "ip:203.0.113.9"
        assert burst(loader, Identity(address="ip:2001:db8:1:2::/64")).key == "ip:2001:db8:1::/48"
        assert burst(loader, USER).key == "user:1"

    def test_numbers_of_one_address_do_not_change_a_count_of_its_network(self, loader: Loader) -> None:
        rule(key_kind="ip", ipv4_prefix=24)
        KeyOverride.objects.create(key="ip:203.0.113.9", rule="burst", capacity=99)
        assert capacity(loader, ADDRESS) == 10

    def test_a_rule_that_names_get_covers_head(self, loader: Loader) -> None:
        rule("reads", scope="search:GET")
        rule("writes", scope="search:POST,PUT")
        rule("all", scope="search")
        assert names(loader, scope="search", method="GET") == ["all", "reads"]
        assert names(loader, scope="search", method="HEAD") == ["all", "reads"]
        assert names(loader, scope="search", method="OPTIONS") == ["all"]
        assert names(loader, scope="other", method="HEAD") == []

    def test_another_rule_that_names_head_takes_its_place_in_its_scope_and_meter(self, loader: Loader) -> None:
        rule("reads", scope="search:GET")
        rule("heads", scope="search:HEAD")
        rule("everywhere", scope="*:GET")
        rule("words", scope="search:GET", meter="tokens")
        assert names(loader, scope="search", method="HEAD") == ["everywhere", "heads", "words"]
        assert names(loader, scope="search", method="GET") == ["everywhere", "reads", "words"]
        assert names(loader, scope="other", method="HEAD") == ["everywhere"]

    def test_a_rule_that_names_both_takes_the_place_of_one_that_names_get(self, loader: Loader) -> None:
        rule("reads", scope="search:GET")
        rule("both", scope="search:GET,HEAD")
        assert names(loader, scope="search", method="HEAD") == ["both"]
        assert names(loader, scope="search", method="GET") == ["both", "reads"]

    @pytest.mark.parametrize("mode", ["shadow", "off"])
    def test_a_rule_that_is_not_enforced_takes_no_others_place(self, loader: Loader, mode: str) -> None:
        rule("reads", scope="search:GET")
        rule("heads", scope="search:HEAD", mode=mode)
        shown = {"shadow": ["heads", "reads"], "off": ["reads"]}
        assert names(loader, scope="search", method="HEAD") == shown[mode]

    def test_a_rule_of_a_plan_takes_a_place_for_who_is_on_it_alone(self, loader: Loader) -> None:
        plan = Plan.objects.create(slug="pro", name="Pro")
        PlanMembership.objects.create(plan=plan, key="api_key:9")
        rule("reads", scope="search:GET")
        rule("heads", scope="search:HEAD", plan=plan)
        assert names(loader, KEY, scope="search", method="HEAD") == ["heads"]
        assert names(loader, USER, scope="search", method="HEAD") == ["reads"]

    def test_a_scope_may_be_narrowed_to_methods(self, loader: Loader) -> None:
        rule("all")
        rule("search", scope="search")
        rule("post", scope="search:POST,PUT")
        rule("writes", scope="*:POST")
        assert names(loader, scope="") == ["all"]
        assert names(loader, scope="other", method="POST") == ["all", "writes"]
        assert names(loader, scope="search") == ["all", "search"]
        assert names(loader, scope="search", method="PUT") == ["all", "post", "search"]
        assert names(loader, scope="search", method="POST") == ["all", "post", "search", "writes"]

    def test_a_rule_that_is_off_does_not_apply_and_one_in_the_shadow_says_so(self, loader: Loader) -> None:
        rule("a", mode="off")
        rule("b", mode="shadow")
        assert [(one.name, one.mode) for one in loader.current().applicable("*", "GET", KEY)] == [("b", Mode.SHADOW)]

    def test_what_happens_without_redis_is_the_projects_choice_unless_the_rule_says(self, loader: Loader) -> None:
        rule("a")
        rule("b", on_failure="local")
        assert [one.on_failure for one in loader.current().applicable("*", "GET", KEY)] == ["allow", "local"]

    def test_a_row_that_makes_no_sense_does_not_take_the_others_down(
        self, loader: Loader, caplog: pytest.LogCaptureFixture
    ) -> None:
        rule("good")
        rule("bad", "calendar_window")
        Rule.objects.filter(name="bad").update(timezone="Mars/Olympus")
        assert names(loader) == ["good"]
        assert [one.name for one in loader.current().select("*", "GET", KEY).unreadable] == ["bad"]
        loader.current().applicable("search", "POST", USER)
        assert caplog.text.count("is not valid, so its failure policy decides. The reason: unknown time zone") == 1


class TestPrecedence:
    def test_key_override_account_override_keys_plan_accounts_plan_default(self, loader: Loader) -> None:
        pro, team = (Plan.objects.create(name=name, slug=name) for name in ("pro", "team"))
        rule(capacity=1)
        assert (capacity(loader), burst(loader).plan) == (1, "")

        rule(plan=team, capacity=2)
        Account.objects.create(identifier="1", plan=team)
        assert (capacity(loader), burst(loader).plan) == (2, "team")

        rule(plan=pro, capacity=3)
        PlanMembership.objects.create(key="user:1", plan=pro)
        assert (capacity(loader), burst(loader).plan) == (3, "pro")

        KeyOverride.objects.create(key="account:1", rule="burst", capacity=4)
        assert capacity(loader) == 4

        KeyOverride.objects.create(key="user:1", rule="burst", capacity=5)
        assert capacity(loader) == 5

        KeyOverride.objects.create(key="api_key:9", rule="burst", capacity=6)
        assert capacity(loader) == 5  # the user's count has one capacity, whichever API key a request has
        assert capacity(loader, Identity(user="user:2")) == 1

    def test_an_override_of_an_api_key_changes_what_is_counted_per_api_key(self, loader: Loader) -> None:
        for name in ("caller", "api_key"):
            rule(name, key_kind=name, capacity=1)
            KeyOverride.objects.create(key="api_key:9", rule=name, capacity=6)
        applied = loader.current().applicable("*", "GET", KEY)
        assert {one.name: getattr(one.algorithm, "capacity", 0) for one in applied} == {"api_key": 6, "caller": 1}

    def test_the_api_keys_plan_comes_before_the_users(self, loader: Loader) -> None:
        free, pro = (Plan.objects.create(name=name, slug=name) for name in ("free", "pro"))
        rule(plan=free, capacity=1)
        rule(plan=pro, capacity=2)
        PlanMembership.objects.create(key="user:1", plan=free)
        PlanMembership.objects.create(key="api_key:9", plan=pro)
        assert (capacity(loader, KEY), capacity(loader, USER)) == (2, 1)

    def test_rules_of_other_names_apply_beside_each_other(self, loader: Loader) -> None:
        pro, team = (Plan.objects.create(name=name, slug=name) for name in ("pro", "team"))
        rule("a")
        rule("b", plan=team)
        rule("c", plan=pro)
        Account.objects.create(identifier="1", plan=team)
        PlanMembership.objects.create(key="user:1", plan=pro)
        assert names(loader) == ["a", "b", "c"]
        assert names(loader, Identity(user="user:2")) == ["a"]

    def test_a_plans_rule_takes_the_place_of_the_default_one_in_every_scope(self, loader: Loader) -> None:
        pro = Plan.objects.create(name="pro", slug="pro")
        rule("a")
        rule("a", plan=pro, scope="search")
        rule("b")
        rule("b", plan=pro, mode="off")
        PlanMembership.objects.create(key="user:1", plan=pro)
        assert names(loader) == []
        assert names(loader, scope="search") == ["a"]

    def test_each_number_comes_from_the_nearest_override_that_gives_it(self, loader: Loader) -> None:
        rule(algorithm="gcra")
        KeyOverride.objects.create(key="account:1", rule="burst", capacity=20, rate=7, mode="shadow")
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=30)
        applied = burst(loader, USER)
        assert applied.algorithm == Gcra(30, Decimal(7), Decimal(1))
        assert applied.mode == Mode.SHADOW

    def test_an_override_of_the_mode_reaches_counts_that_are_shared_and_its_numbers_do_not(
        self, loader: Loader
    ) -> None:
        rule("everyone", key_kind="global", capacity=10)
        KeyOverride.objects.create(key="user:1", rule="everyone", capacity=99)
        [applied] = loader.current().applicable("*", "GET", USER)
        assert applied.algorithm == TokenBucket(10, Decimal(5), Decimal(1))
        KeyOverride.objects.update(mode="off")
        assert names(loader, USER) == []
        assert names(loader, ADDRESS) == ["everyone"]

    def test_an_addresss_numbers_do_not_reach_an_api_key_that_is_used_from_it(self, loader: Loader) -> None:
        rule(capacity=10)
        KeyOverride.objects.create(key="ip:203.0.113.9", rule="burst", capacity=99)
        assert (capacity(loader, ADDRESS), capacity(loader, KEY)) == (99, 10)

    def test_under_an_override_that_no_longer_fits_the_failure_policy_decides_and_that_is_said_once(
        self, loader: Loader, caplog: pytest.LogCaptureFixture
    ) -> None:
        rule(capacity=10, on_failure="deny")
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=20, rate=0)
        selections = [loader.reload().select(scope, "GET", USER) for scope in ("*", "search")]
        loader.forget()
        selections.append(loader.reload().select("*", "GET", USER))
        assert {(one.rules, one.unreadable[0][0], one.unreadable[0].refuses) for one in selections} == {
            ((), "burst", True)
        }
        assert capacity(loader, ADDRESS) == 10
        assert caplog.text.count("rate must be above 0") == 2, "once for each time that the rows were read"

    def test_an_override_of_capacity_zero_blocks_whatever_else_the_rule_says(self, loader: Loader) -> None:
        rule(capacity=10, initial="5")
        KeyOverride(key="user:1", rule="burst", capacity=0).full_clean()
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=0)
        assert (capacity(loader, USER), capacity(loader, ADDRESS)) == (0, 10)

    def test_at_most_one_rule_bills_a_count_that_of_the_nearest_plan(self, loader: Loader) -> None:
        pro, team = (Plan.objects.create(name=name, slug=name) for name in ("pro", "team"))
        rule("a", plan=team, bills=True, key_kind="user")
        rule("b", plan=pro, bills=True, key_kind="user")
        rule("c", plan=pro, bills=True, key_kind="user", meter="tokens")
        Account.objects.create(identifier="1", plan=team)
        PlanMembership.objects.create(key="user:1", plan=pro)
        bills = {one.name: one.bills for one in loader.current().applicable("*", "GET", USER)}
        assert bills == {"a": False, "b": True, "c": True}


class TestVersions:
    def test_a_rules_version_is_that_of_the_newest_row_that_shaped_it(self, loader: Loader) -> None:
        row = rule()
        rule("other")
        assert (burst(loader).version, burst(loader).since) == (1, row.since)
        override = KeyOverride.objects.create(key="user:1", rule="burst", capacity=20)
        assert (burst(loader).version, burst(loader).since) == (3, override.since)
        assert burst(loader, ADDRESS).version == 1
        row.save()
        assert (burst(loader).version, burst(loader).since) == (4, row.since)

    def test_a_rule_that_comes_back_into_force_does_so_when_what_replaced_it_went(self, loader: Loader) -> None:
        pro = Plan.objects.create(name="pro", slug="pro")
        PlanMembership.objects.create(key="user:1", plan=pro)
        row = rule(capacity=1)
        replacement = rule(plan=pro, capacity=2)
        assert capacity(loader) == 2
        replacement.delete()
        for again in (loader, Loader()):
            applied = burst(again)
            assert (applied.rule, applied.version) == (row.pk, 5)
            assert applied.since > row.since
        assert burst(loader, ADDRESS).version == 3

    def test_a_default_rule_that_is_deleted_does_not_edit_the_rule_of_an_accounts_plan(self, loader: Loader) -> None:
        team = Plan.objects.create(name="team", slug="team")
        Account.objects.create(identifier="1", plan=team)
        default, of_plan = rule(capacity=1), rule(plan=team, capacity=2)
        before = burst(loader)
        assert (before.rule, before.version) == (of_plan.pk, 4)
        default.delete()
        for again in (loader, Loader()):
            after = burst(again)
            assert (after.rule, after.version, after.since) == (of_plan.pk, 4, before.since)

    def test_limits_hold_since_the_key_came_to_its_plan(self) -> None:
        loader = Loader()
        pro = Plan.objects.create(name="pro", slug="pro")
        row = rule(plan=pro)
        membership = PlanMembership.objects.create(key="user:1", plan=pro)
        assert burst(loader).since == membership.since > row.since

    def test_limits_hold_since_the_override_was_lifted(self) -> None:
        row = rule()
        override = KeyOverride.objects.create(key="user:1", rule="burst", capacity=1)
        loader = Loader()
        assert burst(loader).since == override.since
        override.delete()
        assert burst(loader).since == override.since > row.since
        assert burst(Loader()).since == override.since


class TestSelections:
    def test_all_that_are_alike_share_one(self, loader: Loader) -> None:
        rule()
        KeyOverride.objects.create(key="user:7", rule="burst", capacity=20)
        snapshot = loader.current()
        one = snapshot.select("*", "GET", Identity(user="user:1", address="ip:203.0.113.1"))
        assert snapshot.select("*", "GET", Identity(user="user:2", address="ip:203.0.113.2")) is one
        assert snapshot.select("search", "BREW", Identity(user="user:3", address="ip:203.0.113.3")) is one
        assert snapshot.select("*", "GET", Identity(user="user:7", address="ip:203.0.113.1")) is not one
        assert one.keys(Identity(user="user:8")) == ("user:8",)
        assert one.version == snapshot.version == 2

    def test_one_with_an_override_is_kept_too(self, loader: Loader) -> None:
        rule()
        KeyOverride.objects.create(key="user:7", rule="burst", capacity=20)
        snapshot = loader.current()
        assert snapshot.select("*", "GET", Identity(user="user:7")) is snapshot.select(
            "*", "GET", Identity(user="user:7")
        )

    def test_their_number_is_bounded(self, loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ratelimits.rules.snapshot.MAX_SELECTIONS", 3)
        for number in range(5):
            rule(f"r{number}", scope=f"s{number}")
        snapshot = loader.current()
        for number in range(5):
            assert len(snapshot.select(f"s{number}", "GET", KEY).rules) == 1
            assert len(snapshot._selections) <= 3


class TestPassingTime:
    def test_an_override_holds_from_and_until_the_microsecond(self, loader: Loader, clock: Clock) -> None:
        rule(capacity=10)
        begins, ends = clock.seconds + 10, clock.seconds + 20
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=20, valid_from=at(begins), valid_until=at(ends))
        seen = []
        for moment in (begins - 1e-6, begins, ends - 1e-6, ends):
            clock.seconds = moment
            [applied] = loader.current().applicable("*", "GET", USER)
            seen.append((applied.algorithm.shown_limit, applied.since))
        begun, ended = instant(at(begins)), instant(at(ends))
        assert seen == [(10, Rule.objects.get().since), (20, begun), (20, begun), (10, ended)]

    def test_a_membership_ends(self, loader: Loader, clock: Clock) -> None:
        pro = Plan.objects.create(name="pro", slug="pro")
        rule(plan=pro)
        PlanMembership.objects.create(key="user:1", plan=pro, valid_until=at(clock.seconds + 5))
        snapshot = loader.current()
        assert len(snapshot.applicable("*", "GET", USER)) == 1
        assert snapshot.good_until == (clock.seconds + 5) * 1_000_000
        clock.seconds += 5
        assert loader.current() is not snapshot
        assert loader.current().applicable("*", "GET", USER) == ()

    def test_a_snapshot_with_a_calendar_is_good_until_the_period_ends(self, loader: Loader, clock: Clock) -> None:
        rule("month", "calendar_window", timezone="Europe/Paris")
        snapshot = loader.current()
        selection = snapshot.select("*", "GET", USER)
        end = boundaries("month", "Europe/Paris", None, clock())[2]
        assert snapshot.good_until == end
        clock.seconds = end / 1e6 - 1e-6
        assert loader.current() is snapshot
        clock.seconds = end / 1e6
        assert loader.current().select("*", "GET", USER) is not selection

    def test_a_clock_that_steps_far_back_is_followed(self, loader: Loader, clock: Clock) -> None:
        rule(capacity=10)
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=20, valid_until=at(clock.seconds - 1000))
        assert loader.current().applicable("*", "GET", USER)[0].algorithm.shown_limit == 10
        clock.seconds -= 2000
        assert loader.current().applicable("*", "GET", USER)[0].algorithm.shown_limit == 20


class TestBilling:
    def test_calendar_months_in_utc_unless_the_account_says_otherwise(self, loader: Loader, clock: Clock) -> None:
        Account.objects.create(identifier="7", timezone="Europe/Paris", billing_anchor="2026-01-31T06:00")
        snapshot = loader.current()
        plain = ("UTC", None, (), boundaries("month", "UTC", None, clock()))
        assert snapshot.billing(None) == snapshot.billing("account:8") == plain
        own = boundaries("month", "Europe/Paris", "2026-01-31T06:00", clock())
        assert snapshot.billing("account:7") == ("Europe/Paris", "2026-01-31T06:00", (), own)
        assert snapshot.billing("account:7") is snapshot.billing("account:7")

    def test_the_next_month_is_seen_when_it_begins(self, loader: Loader, clock: Clock) -> None:
        current = loader.current().billing(None).boundaries
        clock.seconds = current[2] / 1e6 - 1e-6
        assert loader.current().billing(None).boundaries == current
        clock.seconds = current[2] / 1e6
        assert loader.current().billing(None).boundaries[1] == current[2]

    def test_a_month_lasts_about_a_month(self, loader: Loader) -> None:
        previous, current, following, last = loader.current().billing(None).boundaries
        for start, end in ((previous, current), (current, following), (following, last)):
            assert timedelta(days=28) <= timedelta(microseconds=end - start) <= timedelta(days=31)


class TestInAnyScope:
    def test_it_has_the_rules_of_every_scope_each_with_its_origin(self, loader: Loader) -> None:
        pro, gold = (Plan.objects.create(name=name, slug=name) for name in ("pro", "gold"))
        Account.objects.create(identifier="1", plan=pro)
        PlanMembership.objects.create(key="user:1", plan=gold)
        for name, plan in (("burst", None), ("burst", pro), ("day", None), ("day", pro), ("day", gold), ("hour", None)):
            rule(name, plan=plan, scope=f"{name}:POST")
        rule("off", mode="off")
        rule("payer", key_kind="account")
        found = loader.current().in_any_scope(USER)
        assert [(one.row.name, one.plan_of, one.overrides) for one in found] == [
            ("burst", "account", ()),
            ("day", "key", ()),
            ("hour", "", ()),
            ("payer", "", ()),
        ]
        assert [one.rule for one in found][:3] == [
            loader.current().select(f"{name}", "POST", USER).rules[0] for name in ("burst", "day", "hour")
        ]
        assert [one.row.name for one in loader.current().in_any_scope(ADDRESS)] == ["burst", "day", "hour"]

    def test_it_has_the_overrides_that_change_a_rule_and_no_others(self, loader: Loader) -> None:
        for name, kind in (("burst", "user"), ("day", "account"), ("gone", "user"), ("wrong", "user")):
            rule(name, key_kind=kind)
        own = KeyOverride.objects.create(key="user:1", rule="burst", capacity=50)
        of_account = KeyOverride.objects.create(key="account:1", rule="burst", rate=9)
        KeyOverride.objects.create(key="user:1", rule="day", capacity=50)  # other keys share that counter
        off = KeyOverride.objects.create(key="user:1", rule="gone", mode="off")
        wrong = KeyOverride.objects.create(key="user:1", rule="wrong", capacity=5)
        KeyOverride.objects.filter(pk=wrong.pk).update(capacity=None, period=-1)
        found = {one.row.name: one for one in loader.current().in_any_scope(USER)}
        assert {name: [override.pk for override in one.overrides] for name, one in found.items()} == {
            "burst": [own.pk, of_account.pk],
            "day": [],
            "gone": [off.pk],
            "wrong": [wrong.pk],
        }
        applied = found["burst"].rule
        assert isinstance(applied, AppliedRule)
        assert applied.algorithm == TokenBucket(50, Decimal(9), Decimal(1))
        assert found["gone"].rule is None
        assert isinstance(found["wrong"].rule, UnreadableRule)
