from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Group
from django.core.management import CommandError, call_command
from django.db import connection

from ratelimits import rules
from ratelimits.billing.models import PlanPrice
from ratelimits.conf import conf
from ratelimits.engine.keys import Keyspace
from ratelimits.engine.server import publish_version
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule, Tombstone
from ratelimits.rules.loader import Loader
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=out)
    return out.getvalue()


def code(tmp_path: Path, **document: Any) -> str:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


BURST = {"name": "burst", "algorithm": "token_bucket", "capacity": 10, "rate": 0.9, "period": 1}
PRO = {"pro": {"name": "Pro", "includes": {"requests": 10_000}}}


class TestRulesAsCode:
    def test_what_was_dumped_loads_as_the_same(self, tmp_path: Path) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanInclusion.objects.create(plan=plan, meter="tokens", quantity=5)
        PlanInclusion.objects.create(plan=plan, meter="bytes", quantity=2**63 - 1)
        rule(rate="0.9", initial="3", max_wait="1.5", scope="search:POST", on_failure="local")
        rule(plan=plan, algorithm="calendar_window", timezone="Europe/Paris", anchor="2026-01-31T06:00", bills=True)
        rule("window", algorithm="sliding_window", sub_windows=6, weighted=True, mode="shadow", key_kind="ip")
        Group.objects.create(name="staff")
        rule("staff", group="staff", except_scopes="health, webhooks", ipv4_prefix=24, ipv6_prefix=56)
        rule("late", "calendar_window", start_from_ledger=True)
        rule("visitors", callers="anonymous", refusal_status=403, refusal_text="Sign in to go on.")
        text = run("ratelimits_rules", "dump")
        (path := tmp_path / "rules.json").write_text(text, encoding="utf-8")

        version = ConfigVersion.read("default")
        assert run("ratelimits_rules", "load", str(path)).startswith("Nothing to change.\n")
        assert ConfigVersion.read("default") == version

        Rule.objects.all().delete()
        Plan.objects.all().delete()
        run("ratelimits_rules", "load", str(path))
        assert run("ratelimits_rules", "dump") == text

    def test_prices_that_were_dumped_load_as_the_same(self, tmp_path: Path) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro", currency="EUR")
        tiers = "1000: 0.1\nmore: 0.05 + 5"
        PlanPrice.objects.create(plan=plan, meter="requests", pricing="graduated", tiers=tiers, minimum=Decimal("20.5"))
        PlanPrice.objects.create(plan=plan, meter="tokens", unit_price=Decimal("0.000000000084"), fees_due="report")
        text = run("ratelimits_rules", "dump")
        assert json.loads(text)["plans"]["pro"] == {
            "name": "Pro",
            "includes": {},
            "currency": "EUR",
            "prices": {
                "requests": {"pricing": "graduated", "tiers": tiers.splitlines(), "minimum": "20.5"},
                "tokens": {"pricing": "per_unit", "unit_price": "0.000000000084", "fees_due": "report"},
            },
        }
        (path := tmp_path / "rules.json").write_text(text, encoding="utf-8")
        assert run("ratelimits_rules", "load", str(path)).startswith("Nothing to change.\n")
        Plan.objects.all().delete()
        assert "added plan pro" in run("ratelimits_rules", "load", str(path))
        assert run("ratelimits_rules", "dump") == text

    def test_a_price_that_is_changed_or_gone_changes_its_plan_alone(self, tmp_path: Path) -> None:
        plans = {slug: {"currency": "EUR", "prices": {"requests": {"unit_price": "0.10"}}} for slug in ("a", "b")}
        run("ratelimits_rules", "load", code(tmp_path, plans=plans))
        version = PlanPrice.objects.get(plan__slug="b").version
        plans["a"]["prices"] = {"requests": {"unit_price": 0.2}, "tokens": {"unit_price": 1}}
        assert run("ratelimits_rules", "load", code(tmp_path, plans=plans)).splitlines()[0] == "changed plan a"
        prices = PlanPrice.objects.filter(plan__slug="a").order_by("meter").values_list("meter", "unit_price")
        assert list(prices) == [("requests", Decimal("0.2")), ("tokens", Decimal(1))]
        assert PlanPrice.objects.get(plan__slug="b").version == version
        plans["b"] = {"prices": {}}
        assert run("ratelimits_rules", "load", code(tmp_path, plans=plans)).splitlines()[0] == "changed plan b"
        assert not PlanPrice.objects.filter(plan__slug="b").exists()

    def test_a_file_that_names_no_prices_leaves_them_as_they_are(self, tmp_path: Path) -> None:
        entry = {**PRO["pro"], "currency": "EUR", "prices": {"requests": {"unit_price": "0.1"}}}
        run("ratelimits_rules", "load", code(tmp_path, plans={"pro": entry}))
        version, before = ConfigVersion.read("default"), run("ratelimits_rules", "dump")
        old = code(tmp_path, plans=PRO)
        assert run("ratelimits_rules", "diff", old, "--delete") == ""
        assert run("ratelimits_rules", "load", old, "--delete").startswith("Nothing to change.\n")
        assert (ConfigVersion.read("default"), run("ratelimits_rules", "dump")) == (version, before)
        run("ratelimits_rules", "load", code(tmp_path, plans={"pro": {**PRO["pro"], "prices": {}, "currency": ""}}))
        assert not PlanPrice.objects.exists()
        assert Plan.objects.get().currency == ""

    def test_a_load_is_one_edit_and_says_what_it_changed(self, tmp_path: Path) -> None:
        said = run("ratelimits_rules", "load", code(tmp_path, plans=PRO, rules=[BURST, {**BURST, "plan": "pro"}]))
        assert said.splitlines() == [
            "added plan pro",
            "added rule “burst”: 0.9 requests per second, bursts to 10, per caller",
            "added rule “burst” of plan “pro”: 0.9 requests per second, bursts to 10, per caller",
        ]
        assert ConfigVersion.read("default")[0] == 1
        assert Rule.objects.get(plan=None).history.get().history_change_reason == "ratelimits_rules load"

        changed = {"pro": {"name": "Professional", "includes": {"requests": 10_000}}}
        faster = {**BURST, "rate": 1}
        assert run("ratelimits_rules", "load", code(tmp_path, plans=changed, rules=[faster])).splitlines() == [
            "changed plan pro",
            "changed rule “burst”: 1 request per second, bursts to 10, per caller",
        ]

    def test_what_it_does_not_name_stays_unless_told_to_go(self, tmp_path: Path) -> None:
        Plan.objects.create(name="Old", slug="old")
        rule("old")
        path = code(tmp_path, rules=[BURST])
        assert run("ratelimits_rules", "load", path).startswith("added rule “burst”")
        assert run("ratelimits_rules", "load", path, "--delete").splitlines() == [
            "deleted rule “old”",
            "deleted plan old",
        ]
        assert list(Rule.objects.values_list("name", flat=True)) == ["burst"]

    def test_billing_can_be_handed_over(self, tmp_path: Path) -> None:
        rule("a", bills=True)
        entries = [{**BURST, "name": "a"}, {**BURST, "name": "b", "bills": True}]
        run("ratelimits_rules", "load", code(tmp_path, rules=entries))
        assert Rule.objects.get(bills=True).name == "b"

    def test_a_diff_changes_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        rule(rate="0.9", capacity=5)
        path = code(tmp_path, rules=[BURST])
        out = io.StringIO()
        with pytest.raises(SystemExit, match="1"):
            call_command("ratelimits_rules", "diff", path, stdout=out)
        [removed, added] = [line for line in out.getvalue().splitlines() if line[0] in "+-" and line[1] == " "]
        assert '"capacity": 5' in removed
        assert '"capacity": 10' in added
        assert (Rule.objects.get().capacity, ConfigVersion.read("default")[0]) == (5, 1)

        run("ratelimits_rules", "load", path)
        assert run("ratelimits_rules", "diff", path) == ""

    def test_a_scope_that_no_view_has_is_loaded_and_warned_of(self, tmp_path: Path) -> None:
        said = run("ratelimits_rules", "load", code(tmp_path, rules=[{**BURST, "scope": "serach"}])).splitlines()
        assert said[0].startswith("added rule “burst”")
        assert said[1].startswith("Warning: rule “burst”: No view has the scope “serach”")
        assert run("ratelimits_rules", "load", code(tmp_path, rules=[{**BURST, "scope": "text"}])).count("\n") == 1

    def test_a_diff_warns_like_a_load(self, tmp_path: Path) -> None:
        path = code(tmp_path, rules=[{**BURST, "scope": "serach"}])
        out = io.StringIO()
        with pytest.raises(SystemExit, match="1"):
            call_command("ratelimits_rules", "diff", path, stdout=out, stderr=out)
        assert "Warning: rule “burst”: No view has the scope “serach”" in out.getvalue()

    def test_a_strict_load_takes_a_warning_for_an_error(self, tmp_path: Path) -> None:
        path = code(tmp_path, rules=[{**BURST, "scope": "serach"}])
        with pytest.raises(CommandError, match=r"because of --strict:\nWarning: rule “burst”: No view"):
            run("ratelimits_rules", "load", "--strict", path)
        assert Rule.objects.count() == 0
        run("ratelimits_rules", "load", path)
        assert "Warning" in run("ratelimits_rules", "diff", path)
        with pytest.raises(SystemExit, match="1"):
            run("ratelimits_rules", "diff", "--strict", path)
        assert run("ratelimits_rules", "load", "--strict", code(tmp_path, rules=[{**BURST, "scope": "text"}])) != ""

    def test_errors_of_the_form_and_of_the_rules_are_said_at_once(self, tmp_path: Path) -> None:
        """A rule of a wrong plan is left out: perhaps only the plan is wrong."""
        document = {
            "plans": {"pro": 5},
            "rules": [
                {**BURST, "name": "typo", "colour": "red"},
                {**BURST, "name": "number", "capacity": -1},
                {"rate": "ten a minute", "capacity": "ten", "colour": "red"},
                {**BURST, "name": "dice", "algorithm": "dice", "rate": "10/min", "bills": 1, "colour": "red"},
                {"capacity": 3},
                {**BURST, "name": "of-pro", "plan": "pro"},
                BURST,
                BURST,
            ],
        }
        with pytest.raises(CommandError) as caught:
            run("ratelimits_rules", "load", code(tmp_path, **document))
        first, *problems = str(caught.value).split("\n")
        assert first == "Nothing was changed:"
        starts = [
            "plan “pro”: write",
            "rule 1: “typo”: token_bucket has no field colour",
            "rule 3: “ten a minute” is not",
            "rule 3: the name is missing or not a text: write an object such as",
            "rule 3: token_bucket has no field colour",
            "rule 3: capacity must be a whole number",
            "rule 4: “dice”: algorithm must be one of",
            "rule 4: “dice”: a rule has no field colour",
            "rule 4: “dice”: bills must be true or false, not 1",
            "rule 5: the name is missing or not a text: write an object such as",
        ]
        starts += ["rule “burst” is in the document twice", *["rule “number”: capacity: "] * 2]
        assert [problem[: len(start)] for problem, start in zip(problems, starts, strict=True)] == starts
        assert (Rule.objects.count(), ConfigVersion.read("default")[0]) == (0, 0)

    def test_a_length_of_time_may_have_a_unit(self, tmp_path: Path) -> None:
        run("ratelimits_rules", "load", code(tmp_path, rules=[{**BURST, "period": "1 day", "max_wait": "5 min"}]))
        row = Rule.objects.get()
        assert (row.period, row.max_wait) == (86_400, 300)

    @pytest.mark.parametrize(
        ("document", "problem"),
        [
            ({"rules": [{**BURST, "rate": 0}]}, "rule “burst”: rate: rate must be above 0, not 0."),
            ({"rules": [{**BURST, "capacity": -1, "rate": 0}]}, "rule “burst”: rate: rate must be above 0, not 0."),
            ({"rules": [{**BURST, "period": "1 mo"}]}, "period: “1 mo” is not a length of time: write seconds"),
            ({"rules": [{**BURST, "algorithm": "dice"}]}, "rule 1: “burst”: algorithm must be one of fixed_window"),
            ({"rules": [{**BURST, "sub_windows": 3}]}, "token_bucket has no field sub_windows"),
            ({"rules": [{**BURST, "colour": "red"}]}, "token_bucket has no field colour"),
            ({"rules": [{**BURST, "plan": "pro"}]}, "there is no plan “pro”: add it under plans"),
            ({"rules": [BURST, BURST]}, "rule “burst” is in the document twice"),
            (
                {"rules": [{**BURST, "mode": "sometimes"}]},
                "rule “burst”: mode must be one of enforce, shadow, off, not “sometimes”",
            ),
            ({"rules": ["burst"]}, "rule 1: write an object such as"),
            (
                {"rules": [{**BURST, "bills": True}, {**BURST, "name": "b", "bills": True}]},
                "rule “burst”: bills: “b” already bills requests per caller",
            ),
            ({"plans": {"pro": 5}}, "plan “pro”: write"),
            (
                {"plans": {"pro": {"includes": {"requests": -1}}}},
                "plan “pro”: included quantity of requests: quantity: Ensure",
            ),
            (
                {"plans": {"pro": {"prices": {"requests": {"unit_price": "0.10"}}}}},
                "plan “pro”: price of requests: meter: The plan has no currency: set one on the plan, such as EUR.",
            ),
            ({"plans": {"pro": {"currency": "EURO"}}}, "plan “pro”: currency: "),
            (
                {"plans": {"pro": {"currency": "EUR", "prices": {"requests": {"pricing": "volume", "tiers": ["9"]}}}}},
                "plan “pro”: price of requests: tiers: “9” is not a tier: write a tier as",
            ),
            ({"limits": []}, "write an object such as"),
            ({"rules": {}}, "plans must be an object whose keys are slugs, and rules a list"),
        ],
    )
    def test_nonsense_is_said_and_nothing_is_changed(
        self, tmp_path: Path, document: dict[str, Any], problem: str
    ) -> None:
        good = {**BURST, "name": "good"}
        document = (
            {**document, "rules": [*document["rules"], good]} if isinstance(document.get("rules"), list) else document
        )
        with pytest.raises(CommandError) as caught:
            run("ratelimits_rules", "load", code(tmp_path, **document))
        assert problem in str(caught.value)
        assert (Rule.objects.count(), Plan.objects.count(), ConfigVersion.read("default")[0]) == (0, 0, 0)

    def test_a_plan_that_keys_are_on_is_not_deleted(self, tmp_path: Path) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanMembership.objects.create(key="user:1", plan=plan)
        with pytest.raises(CommandError, match="first move its keys and accounts to another plan"):
            run("ratelimits_rules", "load", code(tmp_path, rules=[BURST]), "--delete")
        assert not Rule.objects.exists()

    def test_a_file_that_is_not_there_or_no_json(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match="No such file"):
            run("ratelimits_rules", "load", str(tmp_path / "none.json"))
        (path := tmp_path / "bad.json").write_text("{\n  rules", encoding="utf-8")
        with pytest.raises(CommandError, match="line 2: not JSON"):
            run("ratelimits_rules", "load", str(path))


class TestReload:
    def sql(self, text: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(text)

    def shown(self, loader: Loader) -> dict[str, int | float]:
        identity = Identity(user="user:1")
        return {one.name: one.algorithm.shown_limit for one in loader.reload().applicable("*", "GET", identity)}

    def test_raw_sql_gets_versions_history_and_comes_into_force(self, loader: Loader) -> None:
        changed, deleted = rule("changed", capacity=1), rule("deleted")
        KeyOverride.objects.create(key="user:1", rule="changed", capacity=5)
        assert self.shown(loader) == {"changed": 5, "deleted": 10}
        self.sql("UPDATE ratelimits_rule SET capacity = 2 WHERE name = 'changed'")
        self.sql("DELETE FROM ratelimits_rule WHERE name = 'deleted'")
        self.sql("UPDATE ratelimits_keyoverride SET \"key\" = 'user:2'")
        said = run("ratelimits_reload").splitlines()
        assert said == [
            f"changed: rule {changed.pk}: changed",
            f"deleted: rule {deleted.pk}",
            f"changed: override {KeyOverride.objects.get().pk}: changed for user:2",
            "Version 4 is in force.",
        ]
        assert self.shown(loader) == {"changed": 2}
        assert (Rule.as_of(changed.pk, 3).capacity, Rule.as_of(changed.pk, 4).capacity) == (1, 2)
        with pytest.raises(Rule.DoesNotExist):
            Rule.as_of(deleted.pk, 4)
        assert run("ratelimits_reload") == "Version 5 is in force.\n"

    def test_everybody_reads_everything_again(self, loader: Loader, queries: list[str]) -> None:
        rule()
        self.shown(loader)
        run("ratelimits_reload")
        del queries[:]
        self.shown(loader)
        assert [sql for sql in queries if 'FROM "ratelimits_rule"' in sql and "WHERE" not in sql]

    def test_old_tombstones_go(self) -> None:
        for name in ("old", "new"):
            rule(name).delete()
        Tombstone.objects.filter(rule="old").update(since=1)
        run("ratelimits_reload")
        assert [tombstone.rule for tombstone in Tombstone.objects.all()] == ["new"]

    def test_a_database_that_was_restored_gets_ahead_of_redis(self, redis_client: redis.Redis) -> None:
        rule()
        publish_version(50)
        run("ratelimits_reload")
        assert ConfigVersion.read("default")[0] == 51
        head = redis_client.get(Keyspace("test", conf.SHARDS).head(0))
        assert head is not None
        assert head.split()[0] == b"51"

    def test_redis_away_is_said(self, settings: Any) -> None:
        settings.CACHES = {
            **settings.CACHES,
            "ratelimits": {**settings.CACHES["ratelimits"], "LOCATION": "redis://127.0.0.1:1/0"},
        }
        said = "Processes read all rules again within 30 s, since Redis does not answer: Error 111 connecting to "
        assert f"{said}127.0.0.1:1. Connection refused.\n" in run("ratelimits_reload")
        rules.forget()
