"""Test rows that make no sense: `manage.py check` and the admin show them. How many rules and meters are too many?"""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.core import checks
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils import timezone

from ratelimits.billing.models.prices import PlanPrice
from ratelimits.decorators import limited
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import Account, KeyOverride, Plan, PlanInclusion, Rule
from ratelimits.models.validation.crowding import Crowd
from ratelimits.models.validation.crowding import too_many as most_rules
from ratelimits.quota.costs import MAX_FURTHER
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db(transaction=True)


def messages() -> list[checks.CheckMessage]:
    """Return what the checks of the database say of rows. (W032 says that no worker runs.)"""
    found = checks.run_checks(tags=[checks.Tags.database], databases=["default"])
    return [one for one in found if str(one.id).startswith("ratelimits.") and one.id != "ratelimits.W032"]


def ids() -> list[str]:
    return [str(one.id) for one in messages()]


def test_what_makes_sense_is_no_error() -> None:
    rule(capacity=0)
    KeyOverride.objects.create(key="user:1", rule="burst", capacity=0)
    Account.objects.create(identifier="1", timezone="Europe/Paris", billing_anchor="2026-01-31T06:00")
    assert ids() == []


def test_a_rule_an_override_and_an_account_that_cannot_be_read_are_errors_of_the_command() -> None:
    rule()
    rule("broken", "calendar_window")
    Rule.objects.filter(name="broken").update(timezone="Mars/Olympus")
    KeyOverride.objects.create(key="user:1", rule="burst", rate=0)
    Account.objects.create(identifier="1")
    for anchor in ("2026-01-31T06:07", "the 31st"):
        Account.objects.update(billing_anchor=anchor)
        assert "ratelimits.E022" in ids()
    assert ids() == ["ratelimits.E020", "ratelimits.E021", "ratelimits.E022"]
    with pytest.raises(SystemCheckError, match="unknown time zone 'Mars/Olympus'"):
        call_command("check", databases=["default"], stderr=StringIO())


def test_a_billing_period_with_a_time_zone_of_its_own_or_for_keys_without_one_is_an_error(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    rule("period", "calendar_window", calendar_unit="billing_period", key_kind="user")
    assert ids() == []
    for values, said in (
        ({"timezone": "Asia/Tokyo"}, "Leave the time zone empty"),
        ({"timezone": "", "anchor": "2026-01-10T00:00"}, "Leave the anchor empty"),
        ({"anchor": "", "key_kind": "global"}, "other keys have no billing period."),
    ):
        Rule.objects.update(**values)
        (error,) = messages()
        assert error.id == "ratelimits.E020"
        assert f"(period) is not in force: {said}" in error.msg or said in error.msg
        assert ".." not in error.msg
    Rule.objects.update(key_kind="user")
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "acme"}
    (error,) = messages()
    assert "set RATELIMITS['ONE_ACCOUNT_PER_KEY']" in error.msg


def test_rules_with_a_scope_that_no_view_has_are_a_warning(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": {"/files/": {"scope": "files"}}}
    for name, scope in (("all", "*:POST"), ("some", "files:GET"), ("first", "fiels"), ("second", "serach:POST")):
        rule(name, scope=scope)
    (warning,) = messages()
    assert warning.id == "ratelimits.W052"
    first, second = (Rule.objects.get(name=name) for name in ("first", "second"))
    assert warning.msg == (
        "No view has these scopes of rules, so the rules limit nothing:"
        f" 'fiels' (rule {first.pk}, {first}), 'serach:POST' (rule {second.pk}, {second})."
    )
    settings.RATELIMITS = {**settings.RATELIMITS, "OUTBOUND_SCOPES": ["fiels"]}
    limited("serach")  # Wherever the function is: perhaps the view of another package calls it.
    assert ids() == []
    settings.RATELIMITS = {**settings.RATELIMITS, "OUTBOUND_SCOPES": []}
    Rule.objects.filter(name="first").update(mode=Rule.Mode.OFF)
    assert ids() == []


def test_a_rule_for_a_group_that_was_deleted_is_a_warning() -> None:
    staff = Group.objects.create(name="staff")
    rule("team", group="staff")
    assert ids() == []
    staff.delete()
    (warning,) = messages()
    assert warning.id == "ratelimits.W021"
    assert "applies to nobody: the group 'staff' does not exist" in warning.msg
    Rule.objects.update(mode=Rule.Mode.OFF)
    assert ids() == []


def test_without_the_database_nothing_is_asked() -> None:
    rule("broken", "calendar_window")
    Rule.objects.update(timezone="Mars/Olympus")
    assert checks.run_checks(tags=["ratelimits"], databases=[]) == []


def test_the_admin_shows_that_it_is_not_in_force_and_why(admin_client: Client) -> None:
    row = rule("broken", "calendar_window")
    Rule.objects.update(timezone="Mars/Olympus")
    for url in ("/admin/ratelimits/rule/", f"/admin/ratelimits/rule/{row.pk}/change/"):
        page = admin_client.get(url).content.decode()
        assert "not in force: unknown time zone &#x27;Mars/Olympus&#x27;" in page


def test_so_it_does_of_an_override_whose_numbers_do_not_fit(admin_client: Client) -> None:
    rule()
    row = KeyOverride.objects.create(key="user:1", rule="burst", rate=0)
    other = KeyOverride.objects.create(key="user:2", rule="burst", capacity=0)
    for url, times in (("", 1), (f"{row.pk}/change/", 1), (f"{other.pk}/change/", 0)):
        page = admin_client.get(f"/admin/ratelimits/keyoverride/{url}").content.decode()
        assert page.lower().count("not in force: rate must be above 0, not 0") == times, url


@limited(cost={"requests": 1, "pages": 2})
def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


urlpatterns = [path("view/", view)]


def about_meters(databases: tuple[str, ...] = ("default",)) -> list[checks.CheckMessage]:
    messages = checks.run_checks(tags=["ratelimits"], include_deployment_checks=False, databases=databases)
    return [one for one in messages if one.id in ("ratelimits.E024", "ratelimits.W023")]


def declare(settings: Any, *names: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": list(names)}


@pytest.mark.urls(__name__)
def test_without_the_setting_a_few_meters_of_views_are_no_message() -> None:
    rule("tokens", meter="tokens")
    assert about_meters() == []


@pytest.mark.urls(__name__)
def test_views_that_name_more_meters_than_a_process_accepts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {f"m{number}": 1 for number in range(MAX_FURTHER + 1)}
    monkeypatch.setattr(view, "ratelimits", ("*", costs, None))
    (error,) = about_meters()
    assert (error.id, error.level) == ("ratelimits.E024", checks.ERROR)
    assert error.msg == (
        "Views have a cost on 33 meters that no rule and no plan names: 'm0', 'm1', 'm10', 'm11', 'm12' and 28 more."
        " A process accepts at most 32 such meters."
    )
    assert error.hint == "List the meters of the project in RATELIMITS['METERS']."
    rule("m0", meter="m0")
    assert about_meters() == []


@pytest.mark.urls(__name__)
def test_rows_whose_meter_the_setting_lacks_are_named(settings: Any) -> None:
    declare(settings, "pages")
    row = rule("words", meter="words")
    plan = Plan.objects.create(slug="pro", name="Pro", currency="EUR")
    PlanInclusion.objects.create(plan=plan, meter="mails", quantity=1)
    PlanPrice.objects.create(plan=plan, meter="tokens", unit_price=1)
    PlanPrice.objects.create(plan=plan, meter="pages", unit_price=1)
    PlanPrice.objects.create(plan=plan, meter="requests", unit_price=1)
    assert [(one.id, one.msg) for one in about_meters()] == [
        ("ratelimits.W023", f"RATELIMITS['METERS'] lacks the meter {meter!r}, which this row names: {what}.")
        for meter, what in (
            ("mails", "included quantity of the plan 'pro'"),
            ("tokens", "price of the plan 'pro'"),
            ("words", f"rule {row.pk} (words)"),
        )
    ]
    assert about_meters(databases=()) == []
    declare(settings, "pages", "mails", "tokens", "words")
    assert about_meters() == []


@pytest.mark.urls(__name__)
def test_views_whose_requests_would_all_be_refused_are_an_error(settings: Any) -> None:
    declare(settings, "tokens")
    (error,) = about_meters()
    assert (error.id, error.msg) == (
        "ratelimits.E024",
        "Views have a cost on meters that are not known: 'pages'.",
    )
    rule("pages", meter="pages")
    assert [one.id for one in about_meters()] == ["ratelimits.W023"]


@pytest.mark.urls(__name__)
def test_a_wrong_setting_is_one_error_with_a_hint(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": "tokens"}
    errors = [one for one in checks.run_checks(tags=["ratelimits"], databases=["default"]) if one.level >= checks.ERROR]
    (error,) = errors
    assert (error.id, error.msg) == ("ratelimits.E002", "RATELIMITS['METERS'] is 'tokens'.")
    assert error.hint == (
        'Write a list of at most 1_000 names of meters, such as ["requests", "tokens"]; or None. A name has 1 to 255'
        " letters from a to z, digits, '-' and '_'."
    )


def too_many(rules: QuerySet[Rule]) -> Crowd | None:
    return most_rules(rules, KeyOverride.objects.all())


class TestTooMany:
    def test_rules_that_are_off_count_if_overrides_of_keys_that_can_come_together_switch_them_on(self) -> None:
        Rule.objects.bulk_create(unsaved(f"r{n:03}") for n in range(MAX_LIMITS - 1))
        Rule.objects.bulk_create(unsaved(f"t{n}", mode="off", scope="search") for n in range(4))
        KeyOverride.objects.create(key="user:1", rule="t0", mode="shadow")
        KeyOverride.objects.create(key="user:2", rule="t1", mode="enforce")  # never with user:1
        KeyOverride.objects.create(key="api_key:3", rule="t2", mode="off")
        assert "ratelimits.E023" not in ids()
        with pytest.raises(ValidationError, match=r"With this override, 121 rules .* of user:1 in scope “search”"):
            KeyOverride(key="user:1", rule="t3", mode="enforce").full_clean()
        KeyOverride(key="user:1", rule="t3", mode="off").full_clean()
        KeyOverride(key="user:3", rule="t3", mode="enforce").full_clean()
        with pytest.raises(ValidationError, match="121 rules could apply"):
            unsaved("more").full_clean()
        late = KeyOverride.objects.create(
            key="account:9", rule="t3", mode="enforce", valid_until=timezone.now() + timedelta(days=1)
        )
        (error,) = messages()
        assert error.id == "ratelimits.E023"
        assert "121 rules could apply to a request in scope 'search' (some are switched on by overrides of" in error.msg
        assert too_many(Rule.objects.all()) == (121, "search", ("account:9", "user:2"))
        late.valid_from, late.valid_until = timezone.now() - timedelta(days=3), timezone.now() - timedelta(days=2)
        late.save()
        assert "ratelimits.E023" not in ids()

    def test_an_override_that_weakens_a_rule_of_head_lets_the_rules_of_get_apply(self) -> None:
        Rule.objects.bulk_create(unsaved(f"g{n}", scope="a:GET") for n in range(MAX_LIMITS))
        rule("h", scope="a:HEAD")
        assert too_many(Rule.objects.all()) is None
        KeyOverride.objects.create(key="user:1", rule="h", mode="shadow")
        assert too_many(Rule.objects.all()) == (121, "a", ())

    def test_a_rule_too_many_is_refused_with_the_number_and_what_to_do(self) -> None:
        Rule.objects.bulk_create(unsaved(f"r{n}") for n in range(MAX_LIMITS))
        with pytest.raises(ValidationError) as refused:
            unsaved("more", scope="search").full_clean()
        [said] = refused.value.messages
        assert (
            "121 rules could apply to a request in scope “search”. At most 120 rules may apply to one request. First"
            in said
        )
        unsaved("more", mode="off").full_clean()
        Rule.objects.filter(name="r0").update(mode="off")
        unsaved("more", scope="search").full_clean()
        assert "ratelimits.E023" not in ids()

    def test_an_edit_of_one_that_is_there_is_not_counted_twice(self) -> None:
        Rule.objects.bulk_create(unsaved(f"r{n}") for n in range(MAX_LIMITS))
        row = Rule.objects.get(name="r7")
        row.capacity = 99
        row.full_clean()

    def test_other_scopes_and_methods_are_not_together(self) -> None:
        Rule.objects.bulk_create(unsaved(f"a{n}", scope="a") for n in range(70))
        Rule.objects.bulk_create(unsaved(f"b{n}", scope="b:GET") for n in range(70))
        Rule.objects.bulk_create(unsaved(f"c{n}", scope="b:POST") for n in range(70))
        unsaved("more").full_clean()
        assert "ratelimits.E023" not in ids()
        Rule.objects.bulk_create(unsaved(f"d{n}") for n in range(60))
        assert too_many(Rule.objects.all()) == (130, "b", ())
        assert "ratelimits.E023" in ids()

    def test_head_meets_the_rules_of_get_but_for_those_that_one_of_its_own_takes_the_place_of(self) -> None:
        Rule.objects.bulk_create(unsaved(f"g{n}", scope="a:GET") for n in range(70))
        Rule.objects.bulk_create(unsaved(f"h{n}", scope="a:HEAD", meter="tokens") for n in range(50))
        with pytest.raises(ValidationError, match="121 rules could apply"):
            unsaved("more", scope="a:HEAD", meter="tokens").full_clean()
        Rule.objects.bulk_create(unsaved(f"m{n}", scope="a:HEAD", meter="tokens") for n in range(10))
        assert too_many(Rule.objects.all()) == (130, "a", ())
        Rule.objects.filter(name="h0").update(meter="requests", mode="shadow")
        assert too_many(Rule.objects.all()) == (130, "a", ())
        Rule.objects.filter(name="h0").update(mode="enforce")
        assert too_many(Rule.objects.all()) is None

    def test_a_key_plan_and_an_account_plan_come_together_but_not_rules_of_one_name(self) -> None:
        plans = [Plan.objects.create(name=name, slug=name) for name in ("a", "b", "c")]
        for plan in plans:
            Rule.objects.bulk_create(unsaved(f"r{n}", plan=plan) for n in range(100))
        Rule.objects.bulk_create(unsaved(f"r{n}") for n in range(100))
        assert too_many(Rule.objects.all()) is None
        Rule.objects.bulk_create(unsaved(f"a{n}", plan=plans[0]) for n in range(10))
        Rule.objects.bulk_create(unsaved(f"b{n}", plan=plans[1]) for n in range(10))
        assert too_many(Rule.objects.all()) is None
        with pytest.raises(ValidationError, match="121 rules could apply"):
            unsaved("more", plan=plans[0]).full_clean()
        with pytest.raises(ValidationError, match="121 rules could apply"):
            unsaved("more").full_clean()
        unsaved("more", plan=plans[2]).full_clean()
