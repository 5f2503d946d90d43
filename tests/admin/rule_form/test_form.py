"""Test the rule form: starting points, typed rates and lengths, suggestions, sentences, and what it admits."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import parse_qsl

import pytest
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse

from ratelimits.admin.rule_form.forms import RuleForm
from ratelimits.admin.rule_form.starting_points import STARTING_POINTS, links
from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.models import KeyOverride, Plan, Rule
from tests.admin.test_rules import BUCKET, RULES, errors, text
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

TRIAL = reverse("admin:ratelimits_rule_trial")


def read(**typed: str) -> str:
    rule, said = RuleForm({**BUCKET, **typed}).typed_rule()
    assert rule is not None, said
    return rule.sentence()


class TestStartingPoints:
    def test_each_is_a_link_that_fills_in_a_form_which_can_be_saved(self, admin_client: Client) -> None:
        page = unescape(admin_client.get(RULES + "add/").content.decode())
        for query, words in links():
            assert f'href="{query}"' in page
            assert f">{words}</a>" in page
            form = admin_client.get(RULES + "add/" + query).context["adminform"].form
            shown = {name: form[name].value() for name in form.fields}
            values = {name: str(value) for name, value in shown.items() if value not in (None, False, "")}
            assert dict(parse_qsl(query[1:])).items() <= values.items()
            assert admin_client.post(RULES + "add/", {**values, "_everyone_meant": "1"}).status_code == 302, query
        assert Rule.objects.count() == len(STARTING_POINTS)

    def test_a_saved_rule_has_none(self, admin_client: Client) -> None:
        assert "data-ratelimits-start" not in admin_client.get(f"{RULES}{rule().pk}/change/").content.decode()


class TestTypedRates:
    def test_a_rate_with_its_period_fills_in_both(self, admin_client: Client) -> None:
        admin_client.post(RULES + "add/", {**BUCKET, "rate": "10/5min", "period": ""})
        row = Rule.objects.get()
        assert (row.rate, row.period) == (10, 300)

    def test_it_may_replace_the_period_of_a_saved_rule(self, admin_client: Client) -> None:
        row = rule(key_kind="api_key")
        admin_client.post(f"{RULES}{row.pk}/change/", {**BUCKET, "rate": "100 per hour"})
        row.refresh_from_db()
        assert (row.rate, row.period) == (100, 3_600)

    @pytest.mark.parametrize(
        ("typed", "period"), [("50/s", 1), ("50/m", 60), ("50/min", 60), ("50/h", 3_600), ("50/d", 86_400)]
    )
    def test_a_unit_may_be_its_first_letter(self, typed: str, period: int) -> None:
        form = RuleForm({**BUCKET, "rate": typed, "period": ""})
        assert form.errors == {}
        assert (form.cleaned_data["rate"], form.cleaned_data["period"]) == (50, period)

    def test_a_window_takes_it_as_its_capacity(self) -> None:
        assert read(algorithm="fixed_window", capacity="100/h", period="") == (
            "100 requests per hour, in fixed windows, per API key"
        )

    def test_it_replaces_the_period_of_a_starting_point(self) -> None:
        form = RuleForm({**BUCKET, "rate": "3/min", "period": "1", "period_unit": "s", "initial-period": "1"})
        assert form.errors == {}
        assert (form.cleaned_data["rate"], form.cleaned_data["period"]) == (3, 60)

    def test_the_page_says_which_period_it_had_at_first(self) -> None:
        assert 'name="initial-period" value="60"' in str(RuleForm(initial={"period": 60})["period"])

    def test_beside_another_period_it_is_shown_again_as_it_was_typed(self) -> None:
        form = RuleForm({**BUCKET, "rate": "10/5min", "period": "60"})
        assert list(form.errors) == ["period"]
        assert 'value="10/5min"' in str(form["rate"])

    @pytest.mark.parametrize(
        ("typed", "field", "said"),
        [
            ({"rate": "10/mo"}, "rate", "such as 10/s, 10/m or 10/min, 10/h, 10/d, 10/week or 10/5min."),
            ({"rate": "10/month"}, "rate", "Choose the algorithm calendar window"),
            ({"rate": "10/5min", "period": "60"}, "period", "The rate 10/5min contains a period"),
            ({"capacity": "10/5min"}, "capacity", "is not a whole number"),
            ({"algorithm": "fixed_window", "capacity": "ten/h"}, "capacity", "such as 10/s"),
        ],
    )
    def test_what_it_cannot_mean_is_said_at_its_field(self, typed: dict[str, str], field: str, said: str) -> None:
        form = RuleForm({**BUCKET, **typed})
        assert list(form.errors) == [field]
        assert said in " ".join(map(str, form.errors[field]))

    def test_an_override_takes_it_too(self, admin_client: Client) -> None:
        rule()
        typed = {"key": "user:1", "rule": "burst", "rate": "10/5min", "mode": ""}
        assert admin_client.post("/admin/ratelimits/keyoverride/add/", typed).status_code == 302
        row = KeyOverride.objects.get()
        assert (row.rate, row.period) == (10, 300)


def test_a_length_is_a_number_and_a_unit(admin_client: Client) -> None:
    admin_client.post(RULES + "add/", {**BUCKET, "period": "5", "period_unit": "min", "max_wait": "1.5"})
    row = Rule.objects.get()
    assert (row.period, row.max_wait) == (300, 1.5)
    page = admin_client.get(f"{RULES}{row.pk}/change/").content.decode()
    assert re.search(r'name="period" value="5"', page)
    assert re.search(r'name="period_unit".*?<option value="min" selected>', page, re.DOTALL)
    # A unit that is typed counts, not the list's.
    admin_client.post(f"{RULES}{row.pk}/change/", {**BUCKET, "period": "2 h", "period_unit": "min"})
    row.refresh_from_db()
    assert row.period == 7_200


def test_what_was_not_changed_is_not_said_to_be(admin_client: Client) -> None:
    row = rule(key_kind="api_key")
    response = admin_client.post(f"{RULES}{row.pk}/change/", {**BUCKET, "rate": "6"}, follow=True)
    assert response.status_code == 200
    page = text(admin_client.get(f"{RULES}{row.pk}/history/"))
    assert "Rate: 5" in page
    form = RuleForm(BUCKET, instance=Rule.objects.get())
    assert form.changed_data == ["rate"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_empty_stays_empty(admin_client: Client, algorithm: str) -> None:
    row = rule("burst", algorithm)
    url = f"{RULES}{row.pk}/change/"
    form = admin_client.get(url).context["adminform"].form
    typed = {name: form[name].value() for name in form.fields if form[name].value() not in (None, False)}
    assert admin_client.post(url, typed).status_code == 302
    assert Rule.history.count() == 2
    page = text(admin_client.get("/admin/ratelimits/change/"))
    assert "rule burst changed" in page
    assert "→" not in page.partition("Why Undo")[2], page
    assert admin_client.post(url, {**typed, "mode": "shadow"}).status_code == 302
    assert re.findall(r"(\w+): (\S+) → (\S+)", text(admin_client.get("/admin/ratelimits/change/"))) == [
        ("mode", "enforce", "shadow")
    ]


def test_scopes_and_meters_of_the_views_are_offered(admin_client: Client, settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.admin.urls"
    page = admin_client.get(RULES + "add/").content.decode()
    for name, offered in (("scope", ["*", "search"]), ("meter", ["requests", "tokens"])):
        tag = re.search(rf'<input[^>]*name="{name}"[^>]*>', page)
        assert tag is not None
        assert f'list="id_{name}_suggestions"' in tag[0]
        found = re.search(rf'<datalist id="id_{name}_suggestions">(.*?)</datalist>', page)
        assert found is not None
        assert re.findall(r'value="([^"]*)"', found[1]) == offered


def test_every_algorithm_is_explained_in_a_sentence(admin_client: Client) -> None:
    page = unescape(admin_client.get(RULES + "add/").content.decode())
    for kind in ALGORITHMS.values():
        assert kind.explanation.endswith(".")
        assert f"<dt>{kind.label}</dt><dd>{kind.explanation}</dd>" in page


def test_the_sentence_says_plan_mode_and_billing(admin_client: Client) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    preview = reverse("admin:ratelimits_rule_preview")

    def said(**typed: Any) -> str:
        return str(admin_client.get(preview, {**BUCKET, **typed}).json()["sentence"])

    assert said() == (
        "5 requests per second, bursts to 10, per API key. For everyone, except on plans with a rule of the same name."
        " Requests above this limit are refused."
    )
    shadow = said(plan=plan.pk, mode="shadow", bills="on")
    assert "For keys and accounts on the plan Pro. Shadow: the rule only records what it would refuse" in shadow
    assert shadow.endswith("If this rule is enforced, it bills: ledger lines will then name this rule.")
    assert said(bills="on").endswith("This rule bills: the ledger lines of admitted requests name this rule.")
    assert "Off: the rule limits and records nothing." in said(mode="off")
    assert "In the ledger and in reports, the usage that this rule admits has the name of this rule." in text(
        admin_client.get(RULES + "add/")
    )


class TestWhatItAdmits:
    def test_the_chart_is_drawn_with_a_table_of_the_same_numbers(self, admin_client: Client) -> None:
        response = admin_client.post(TRIAL + "?fragment=1", BUCKET)
        page = text(response)
        assert "Bursts: 20 requests at once, every second: 35 of 120 requests admitted." in page
        assert "Steady overload: 60 requests, spread evenly over 6 seconds: 39 of 60 requests admitted." in page
        drawn = response.content.decode()
        assert drawn.count("<svg") == drawn.count("<table>") == 2
        assert "<html" not in drawn
        cells = [int(cell) for cell in re.findall(r"<td>(\d+)</td>", drawn)]
        assert sum(cells[0:24:3]) == 120
        assert sum(cells[1:24:3]) == 35
        assert sum(cells[2:24:3]) == 85
        assert not Rule.objects.exists()

    def test_without_the_script_it_is_a_page_of_its_own(self, admin_client: Client) -> None:
        form = admin_client.get(RULES + "add/").content.decode()
        assert f'formaction="{TRIAL}"' in form
        page = admin_client.post(TRIAL, BUCKET).content.decode()
        assert "<html" in page
        assert "<figure>" in page
        assert "Nothing was saved." in page
        assert "Requests above this limit are refused." in page

    def test_what_is_wrong_is_said_in_its_place(self, admin_client: Client) -> None:
        page = admin_client.post(TRIAL + "?fragment=1", {**BUCKET, "rate": "<0>"}).content.decode()
        assert "<svg" not in page
        assert "is not a number: write digits" in page
        assert "<0>" not in page

    @pytest.mark.parametrize("query", ["?rule=x", "?rule=0", "?rule=" + "9" * 30, "?rule=-1"])
    def test_a_rule_that_is_not_there_is_taken_for_a_new_one(self, admin_client: Client, query: str) -> None:
        assert "<figure>" in admin_client.post(TRIAL + query, BUCKET).content.decode()

    def test_huge_numbers_are_bounded_work(self, admin_client: Client) -> None:
        huge = {**BUCKET, "capacity": "999999999999", "rate": "999999999", "period": "1"}
        assert "<figure>" in admin_client.post(TRIAL, huge).content.decode()

    def test_a_rule_of_nothing_needs_no_chart(self, admin_client: Client) -> None:
        page = admin_client.post(TRIAL + "?fragment=1", {**BUCKET, "capacity": "0"}).content.decode()
        assert "Everyone would be refused." in page
        assert "<svg" not in page

    def test_without_redis_it_says_so(self, admin_client: Client, settings: Any) -> None:
        settings.CACHES = {
            **settings.CACHES,
            "ratelimits": {**settings.CACHES["ratelimits"], "LOCATION": "redis://127.0.0.1:1/0"},
        }
        page = admin_client.post(TRIAL, BUCKET).content.decode()
        assert "Redis does not answer, so there is no chart of what this rule admits." in page

    def test_who_may_only_view_has_no_chart(self, client: Client, django_user_model: Any) -> None:
        user = django_user_model.objects.create_user("viewer", is_staff=True)
        user.user_permissions.add(Permission.objects.get(codename="view_rule"))
        client.force_login(user)
        page = client.get(f"{RULES}{rule().pk}/change/").content.decode()
        assert "data-ratelimits-trial" not in page
        assert "Requests above this limit are refused." in page
        assert client.post(TRIAL, BUCKET).status_code == 403


def test_an_unknown_algorithm_is_refused_at_its_field(admin_client: Client) -> None:
    assert "algorithm" in errors(admin_client.post(RULES + "add/", {**BUCKET, "algorithm": "none", "rate": "1/s"}))


def test_a_starting_point_has_a_name_that_no_rule_has(admin_client: Client) -> None:
    rule("burst")
    rule("burst-2")
    page = admin_client.get(RULES + "add/").content.decode()
    assert "?name=burst-3&amp;" in page
    assert "?name=monthly&amp;" in page
