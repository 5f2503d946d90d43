from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles import finders
from django.test import Client
from django.urls import reverse

from ratelimits.models import Account, ConfigVersion, KeyOverride, Plan, PlanMembership, Rule
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

RULES = "/admin/ratelimits/rule/"
#: The fields that a browser with JavaScript sends: only those that are shown.
BUCKET = {
    "callers": "everyone",
    "refusal_status": "429",
    "name": "burst",
    "scope": "*",
    "key_kind": "api_key",
    "meter": "requests",
    "mode": "enforce",
    "algorithm": "token_bucket",
    "capacity": "10",
    "rate": "5",
    "period": "1",
    "on_failure": "",
}


def text(response: Any) -> str:
    """Return the text of the page, without its tags."""
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


def errors(response: Any) -> dict[str, str]:
    assert response.status_code == 200
    form = response.context["adminform"].form
    return {field: " ".join(said) for field, said in form.errors.items()}


def version() -> int:
    return ConfigVersion.read("default")[0]


def test_a_rule_is_added_and_read_as_a_sentence(admin_client: Client) -> None:
    response = admin_client.post(RULES + "add/", BUCKET, follow=True)
    assert "5 requests per second, bursts to 10, per API key" in text(response)
    row = Rule.objects.get()
    assert (row.version, row.initial) == (1, "")


def test_the_list_shows_sentence_plan_and_mode_with_filters(admin_client: Client) -> None:
    plan = Plan.objects.create(name="Professional", slug="pro")
    rule("a", plan=plan, mode="shadow")
    rule("b", algorithm="sliding_log")
    page = text(admin_client.get(RULES))
    assert "100 requests in any minute, per caller b - enforce" in page
    assert "per caller a Professional shadow" in page
    assert "By mode All enforce (1) shadow (1) off (0)" in page
    assert "100 requests" not in text(admin_client.get(RULES + "?mode__exact=shadow"))


@pytest.mark.parametrize(
    ("typed", "field", "said"),
    [
        (
            {"rate": "0"},
            "rate",
            "rate must be above 0, not 0. Write how many permits are added again per period, such as 5.",
        ),
        ({"capacity": "-1"}, "capacity", "Write the maximum number of permits at once, such as 10."),
        ({"capacity": ""}, "capacity", "Write the maximum number of permits at once, such as 10."),
        (
            {"algorithm": "leaky_bucket_queue"},
            "max_wait",
            "Write how many seconds a request is allowed to wait, such as 2.",
        ),
        (
            {"algorithm": "calendar_window", "calendar_unit": "day", "timezone": "Mars"},
            "timezone",
            "unknown time zone 'Mars'",
        ),
        (
            {
                "algorithm": "calendar_window",
                "calendar_unit": "billing_period",
                "key_kind": "account",
                "timezone": "Asia/Tokyo",
            },
            "timezone",
            "Leave the time zone empty: a billing period is in the time zone of the account.",
        ),
        (
            {
                "algorithm": "calendar_window",
                "calendar_unit": "billing_period",
                "key_kind": "account",
                "anchor": "2026-01-10T00:00",
            },
            "anchor",
            "Leave the anchor empty: a billing period starts at the billing anchor of the account.",
        ),
        (
            {"algorithm": "calendar_window", "calendar_unit": "billing_period", "key_kind": "ip"},
            "key_kind",
            "other keys have no billing period",
        ),
        ({"scope": "search:post"}, "scope", "Write * for every request"),
        ({"initial": "half"}, "initial", "full, empty or a whole number"),
        (
            {"prefetch": "100"},
            "prefetch",
            "permits come back while a process still has prefetched permits",
        ),
        ({"name": "two words"}, "name", "Enter a valid “slug”"),
    ],
)
def test_nonsense_is_refused_at_its_field(admin_client: Client, typed: dict[str, str], field: str, said: str) -> None:
    found = errors(admin_client.post(RULES + "add/", {**BUCKET, **typed}))
    assert list(found) == [field]
    assert said in found[field]
    assert (Rule.objects.count(), version()) == (0, 0)


def test_a_second_billing_rule_is_refused_at_its_field(admin_client: Client) -> None:
    rule("monthly", bills=True, key_kind="api_key")
    found = errors(admin_client.post(RULES + "add/", {**BUCKET, "bills": "on"}))
    assert "“monthly” already bills requests per API key" in found["bills"]


def test_a_second_rule_of_a_name_is_refused(admin_client: Client) -> None:
    rule()
    found = errors(admin_client.post(RULES + "add/", BUCKET))
    assert found == {
        "__all__": "There is already a default rule with this name: change the existing rule, or choose a plan."
    }


def test_without_the_script_what_belongs_to_another_algorithm_is_dropped(admin_client: Client) -> None:
    admin_client.post(RULES + "add/", {**BUCKET, "algorithm": "fixed_window", "sub_windows": "7", "weighted": "on"})
    row = Rule.objects.get()
    assert (row.rate, row.sub_windows, row.weighted, row.window_start) == (None, None, False, "")


def test_an_edit_takes_a_version_and_says_who_made_it(admin_client: Client, admin_user: User) -> None:
    row = rule()
    admin_client.post(f"{RULES}{row.pk}/change/", {**BUCKET, "capacity": "20"})
    record = Rule.history.first()
    assert (record.capacity, record.version, record.history_user) == (20, 2, admin_user)
    page = text(admin_client.get(f"{RULES}{row.pk}/history/"))
    assert "Changed admin" in page
    assert "Capacity: 10" in page


@pytest.mark.parametrize(("action", "mode"), [("enforce", "enforce"), ("shadow", "shadow"), ("switch_off", "off")])
def test_several_rules_change_their_mode_in_one_edit(
    admin_client: Client, admin_user: User, action: str, mode: str
) -> None:
    rows = [rule(f"r{number}", mode="off" if mode != "off" else "enforce") for number in range(3)]
    before = version()
    chosen = [row.pk for row in rows[:2]]
    response = admin_client.post(RULES, {"action": action, "_selected_action": chosen}, follow=True)
    assert f"The mode of 2 rules is now {mode}." in text(response)
    changed = Rule.objects.filter(mode=mode)
    assert {(row.pk, row.version) for row in changed} == {(pk, before + 1) for pk in chosen}
    records = Rule.history.filter(version=before + 1)
    assert {(record.id, record.history_user) for record in records} == {(pk, admin_user) for pk in chosen}
    assert LogEntry.objects.filter(user=admin_user).count() == 2


def test_deleting_says_who_did_it(admin_client: Client, admin_user: User) -> None:
    rows = [rule("a"), rule("b")]
    admin_client.post(f"{RULES}{rows[0].pk}/delete/", {"post": "yes"})
    admin_client.post(RULES, {"action": "delete_selected", "_selected_action": [rows[1].pk], "post": "yes"})
    records = Rule.history.filter(history_type="-").order_by("version")
    assert [(record.name, record.version, record.history_user) for record in records] == [
        ("a", 3, admin_user),
        ("b", 4, admin_user),
    ]


def test_who_it_was_is_known_without_the_historys_middleware(
    admin_client: Client, admin_user: User, settings: Any
) -> None:
    settings.MIDDLEWARE = [name for name in settings.MIDDLEWARE if "simple_history" not in name]
    row = rule()
    admin_client.post(RULES, {"action": "shadow", "_selected_action": [row.pk]})
    admin_client.post(f"{RULES}{row.pk}/delete/", {"post": "yes"})
    users = Rule.history.filter(version__gt=1).values_list("history_user", flat=True)
    assert list(users) == [admin_user.pk] * 2


def test_who_may_only_look_cannot_change_the_mode(client: Client) -> None:
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_rule"))
    client.force_login(user)
    row = rule()
    assert client.get(RULES).status_code == 200
    client.post(RULES, {"action": "switch_off", "_selected_action": [row.pk]})
    assert Rule.objects.get().mode == "enforce"
    assert client.get(reverse("admin:ratelimits_rule_preview"), BUCKET).status_code == 403


class TestTheForm:
    def test_it_says_which_fields_each_algorithm_has(self, admin_client: Client) -> None:
        page = unescape(admin_client.get(RULES + "add/").content.decode())
        assert '"fixed_window": ["capacity", "period", "window_start"]' in page
        assert '"token_bucket": ["capacity", "rate", "period", "initial", "max_wait"]' in page
        assert "ratelimits/rule_form.js" in page
        assert finders.find("ratelimits/rule_form.js")

    def test_it_reads_what_is_typed(self, admin_client: Client) -> None:
        url = reverse("admin:ratelimits_rule_preview")
        said = admin_client.get(url, BUCKET).json()["sentence"]
        assert said.startswith("5 requests per second, bursts to 10, per API key. ")
        said = admin_client.get(url, {**BUCKET, "rate": "0"}).json()
        assert said["errors"]["rate"][0] == "rate must be above 0, not 0."
        assert not Rule.objects.exists()

    def test_it_reads_a_rule_whose_name_is_taken(self, admin_client: Client) -> None:
        rule()
        assert "sentence" in admin_client.get(reverse("admin:ratelimits_rule_preview"), BUCKET).json()


class TestOverrides:
    URL = "/admin/ratelimits/keyoverride/"

    def test_one_is_added_for_a_rule_that_is_chosen(self, admin_client: Client, admin_user: User) -> None:
        rule()
        assert '<option value="burst">' in admin_client.get(self.URL + "add/").content.decode()
        admin_client.post(self.URL + "add/", {"key": "user:42", "rule": "burst", "capacity": "1000", "mode": ""})
        row = KeyOverride.objects.get()
        assert (row.key, row.capacity, row.version) == ("user:42", 1000, 2)
        assert KeyOverride.history.get().history_user == admin_user
        assert "user:42 burst capacity 1,000" in text(admin_client.get(self.URL))

    @pytest.mark.parametrize(
        ("typed", "field"),
        [({"key": "42"}, "key"), ({"rule": "none"}, "rule"), ({"rate": "0"}, "rate"), ({"capacity": ""}, "__all__")],
    )
    def test_nonsense_is_refused_at_its_field(self, admin_client: Client, typed: dict[str, str], field: str) -> None:
        rule()
        good = {"key": "user:42", "rule": "burst", "capacity": "1000", "mode": ""}
        assert field in errors(admin_client.post(self.URL + "add/", {**good, **typed}))

    @pytest.mark.parametrize(
        ("chosen", "shown"), [("now", {"user:2", "user:4"}), ("later", {"user:3"}), ("ended", {"user:1"})]
    )
    def test_they_can_be_filtered_by_whether_they_hold(
        self, admin_client: Client, chosen: str, shown: set[str]
    ) -> None:
        rule()
        for key, valid in (
            ("user:1", {"valid_until": "2020-01-01T00:00Z"}),
            ("user:2", {"valid_from": "2020-01-01T00:00Z"}),
            ("user:3", {"valid_from": "2120-01-01T00:00Z"}),
            ("user:4", {}),
        ):
            KeyOverride.objects.create(key=key, rule="burst", capacity=1, **valid)
        response = admin_client.get(self.URL, {"in_force": chosen})
        assert {row.key for row in response.context["cl"].queryset} == shown


class TestPlans:
    def test_a_plan_with_what_it_includes_is_one_page(self, admin_client: Client) -> None:
        inline = {
            "inclusions-TOTAL_FORMS": "1",
            "inclusions-INITIAL_FORMS": "0",
            "inclusions-0-meter": "requests",
            "inclusions-0-quantity": "10000",
            "prices-TOTAL_FORMS": "0",
            "prices-INITIAL_FORMS": "0",
        }
        admin_client.post("/admin/ratelimits/plan/add/", {"name": "Pro", "slug": "pro", **inline})
        plan = Plan.objects.get()
        rule(plan=plan)
        Account.objects.create(identifier="7", plan=plan)
        page = text(admin_client.get("/admin/ratelimits/plan/"))
        assert "Pro pro 10,000 requests 1 0 1" in page
        page = text(admin_client.get(f"/admin/ratelimits/plan/{plan.pk}/change/"))
        assert "burst : 5 requests per second, bursts to 10, per caller" in page

    def test_a_plan_that_somebody_is_on_is_not_deleted(self, admin_client: Client) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanMembership.objects.create(key="user:1", plan=plan)
        page = text(admin_client.post(f"/admin/ratelimits/plan/{plan.pk}/delete/", {"post": "yes"}))
        assert "would require deleting the following protected related objects" in page
        assert Plan.objects.exists()

    def test_a_key_is_put_on_a_plan(self, admin_client: Client) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        url = "/admin/ratelimits/planmembership/add/"
        admin_client.post(url, {"key": "api_key:4", "plan": plan.pk})
        assert PlanMembership.objects.get().version == 2
        assert (
            "choose the plan on the page of the account"
            in errors(admin_client.post(url, {"key": "account:7", "plan": plan.pk}))["key"]
        )

    def test_an_account_gets_its_time_zone(self, admin_client: Client) -> None:
        url = "/admin/ratelimits/account/add/"
        assert (
            "unknown time zone" in errors(admin_client.post(url, {"identifier": "7", "timezone": "Mars"}))["timezone"]
        )
        admin_client.post(url, {"identifier": "7", "timezone": "Europe/Paris", "billing_anchor": "2026-01-31T06:00"})
        assert Account.objects.get().key == "account:7"
