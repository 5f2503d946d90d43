"""Test what the admin says of changes: the reason on each form, the page of all changes, and a plan's whole history."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from ratelimits.admin import accounts
from ratelimits.admin.changes.page import PER_PAGE
from ratelimits.admin.changes.rows import audited_models, changed_rows
from ratelimits.models import Account, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.models.history import because
from tests.admin.test_rules import BUCKET, RULES, text
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

CHANGES = reverse("admin:ratelimits_change_changelist")
PLANS = "/admin/ratelimits/plan/"
INLINES = {f"{name}-{count}_FORMS": "0" for name in ("inclusions", "prices") for count in ("TOTAL", "INITIAL")}


def reasons(model: Any) -> list[str | None]:
    """Return the reasons of all records of a table, the newest first."""
    return list(model.history.order_by("-history_id").values_list("history_change_reason", flat=True))


def user_with(client: Client, *permissions: str) -> Client:
    user = User.objects.create_user("some", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


class TestTheReason:
    def test_every_audited_form_asks_for_it(self, admin_client: Client) -> None:
        row = rule()
        plan = Plan.objects.create(name="Pro", slug="pro")
        rows: list[Any] = [
            row,
            plan,
            Account.objects.create(identifier="7"),
            KeyOverride.objects.create(key="user:1", rule="burst", capacity=5),
            PlanMembership.objects.create(key="user:1", plan=plan),
        ]
        for one in rows:
            start = f"/admin/ratelimits/{one._meta.model_name}/"
            for page in ("add/", f"{one.pk}/change/", f"{one.pk}/delete/", ""):
                if page.endswith("delete/") and one is plan:
                    continue  # somebody is on the plan
                asked = admin_client.get(start + page).content.decode()
                assert 'name="change_reason"' in asked, start + page

    def test_it_is_in_the_history_of_a_form(self, admin_client: Client) -> None:
        admin_client.post(RULES + "add/", {**BUCKET, "change_reason": " OPS-1 "})
        row = Rule.objects.get()
        admin_client.post(f"{RULES}{row.pk}/change/", {**BUCKET, "rate": "6", "change_reason": "OPS-2"})
        admin_client.post(f"{RULES}{row.pk}/change/", {**BUCKET, "rate": "7"})
        assert reasons(Rule) == [None, "OPS-2", "OPS-1"]
        assert "OPS-2" in text(admin_client.get(f"{RULES}{row.pk}/history/"))

    def test_it_is_in_the_history_of_what_a_plan_includes(self, admin_client: Client) -> None:
        inline = {**INLINES, "inclusions-TOTAL_FORMS": "1", "inclusions-0-meter": "requests"}
        typed = {"name": "Pro", "slug": "pro", **inline, "inclusions-0-quantity": "10", "change_reason": "OPS-3"}
        assert admin_client.post(PLANS + "add/", typed).status_code == 302
        assert reasons(PlanInclusion) == reasons(Plan) == ["OPS-3"]

    def test_it_is_in_the_history_of_actions_deletions_and_reverts(self, admin_client: Client) -> None:
        rows = [rule("a"), rule("b"), rule("c")]
        act = {"_selected_action": [rows[0].pk], "change_reason": "OPS-4"}
        admin_client.post(RULES, {"action": "shadow", **act})
        assert reasons(Rule)[0] == "OPS-4"
        asked = admin_client.post(RULES, {"action": "delete_selected", **act}).content.decode()
        assert 'name="change_reason" maxlength="100" class="vTextField" value="OPS-4"' in asked
        admin_client.post(RULES, {"action": "delete_selected", **act, "post": "yes", "change_reason": "OPS-5"})
        assert reasons(Rule)[0] == "OPS-5"
        admin_client.post(f"{RULES}{rows[1].pk}/delete/", {"post": "yes", "change_reason": "OPS-6"})
        assert reasons(Rule)[0] == "OPS-6"
        former = Rule.history.filter(id=rows[2].pk).latest()
        url = reverse("admin:ratelimits_rule_simple_history", args=[rows[2].pk, former.pk])
        values = {**BUCKET, "name": "c", "change_reason": "OPS-7"}
        assert admin_client.post(url, values).status_code == 302
        assert reasons(Rule)[0] == "OPS-7"

    def test_one_that_is_too_long_is_refused_by_the_form_and_cut_elsewhere(self, admin_client: Client) -> None:
        response = admin_client.post(RULES + "add/", {**BUCKET, "change_reason": "x" * 101})
        assert list(response.context["adminform"].form.errors) == ["change_reason"]
        row = rule()
        admin_client.post(f"{RULES}{row.pk}/delete/", {"post": "yes", "change_reason": "x" * 200})
        assert reasons(Rule)[0] == "x" * 100

    def test_a_bulk_write_in_code_has_the_reason_of_its_block(self) -> None:
        row = rule()
        with because("import 7"):
            Rule.objects.filter(pk=row.pk).update(capacity=20)
        Rule.objects.filter(pk=row.pk).update(capacity=21)
        assert reasons(Rule)[:2] == [None, "import 7"]


class TestAllChanges:
    def test_it_says_who_changed_what_from_what_to_what_and_why(self, admin_client: Client) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        row = rule(key_kind="api_key")
        typed = {**BUCKET, "rate": "6", "plan": plan.pk, "change_reason": "OPS-1"}
        admin_client.post(f"{RULES}{row.pk}/change/", typed)
        page = text(admin_client.get(CHANGES))
        assert "admin rule burst changed" in page.replace("(Pro)", "").replace("  ", " ")
        assert "rate: 5 → 6" in page
        assert "plan: – → Pro" in page
        assert "OPS-1" in page
        assert f"version {Rule.objects.get().version}" in page
        assert "sub-windows" not in page

    def test_a_capacity_of_zero_is_said(self, admin_client: Client) -> None:
        rule("block", "fixed_window", capacity=0)
        page = text(admin_client.get(CHANGES))
        assert "capacity: 0" in page
        assert "bills" not in page

    def test_each_change_can_be_undone(self, admin_client: Client) -> None:
        changed, deleted, added = rule("a"), rule("b"), rule("c")
        before = changed.history.latest()
        Rule.objects.filter(pk=changed.pk).update(capacity=20)
        pk = deleted.pk
        deleted.delete()
        gone = Rule.history.get(id=pk, history_type="-")
        page = admin_client.get(CHANGES).content.decode()
        undo = reverse("admin:ratelimits_rule_simple_history", args=[changed.pk, before.pk])
        assert f'<a href="{undo}">Undo</a>' in page
        back = reverse("admin:ratelimits_rule_simple_history", args=[pk, gone.pk])
        assert f'<a href="{back}">Undo: add the row again</a>' in page
        delete = reverse("admin:ratelimits_rule_delete", args=[added.pk])
        assert f'<a href="{delete}">Undo: delete the row</a>' in page
        for url in (undo, back, delete):
            assert admin_client.get(url).status_code == 200
        form = admin_client.get(undo).context["adminform"].form
        values = {name: form[name].value() for name in form.fields if form[name].value() not in (None, False)}
        assert admin_client.post(undo, values).status_code == 302
        assert Rule.objects.get(pk=changed.pk).capacity == 10
        # What was changed again since is no longer the last change, and says so.
        assert ">State before the change</a>" in admin_client.get(CHANGES).content.decode()

    def test_it_shows_what_the_user_may_view_and_offers_what_the_user_may_do(self, client: Client) -> None:
        row = rule()
        Account.objects.create(identifier="secret-customer")
        Rule.objects.filter(pk=row.pk).update(capacity=20)
        page = user_with(client, "view_change", "view_rule").get(CHANGES).content.decode()
        assert "rule burst" in page
        assert "secret-customer" not in page
        assert "?table=account" not in page
        assert "simple_history" not in page
        assert "Undo</a>" not in page
        assert "secret-customer" not in client.get(CHANGES, {"table": "account"}).content.decode()

    def test_one_table_can_be_chosen(self, admin_client: Client) -> None:
        rule()
        Account.objects.create(identifier="acme")
        page = text(admin_client.get(CHANGES, {"table": "account"}))
        assert "account acme added" in page
        assert "rule burst" not in page

    def test_pages_follow_each_other_also_through_one_moment(self, admin_client: Client) -> None:
        Account.objects.bulk_create(Account(identifier=f"a{number:03}") for number in range(2 * PER_PAGE + 7))
        assert Account.history.values("history_date").distinct().count() == 1
        rule()
        seen: list[str] = []
        url = CHANGES
        for shown in (PER_PAGE, PER_PAGE, 8):
            context = admin_client.get(url).context
            seen += [change.what for change in context["changes"]]
            assert len(context["changes"]) == shown
            url = CHANGES + context["older"]
        assert context["older"] == ""
        assert len(set(seen)) == 2 * PER_PAGE + 8

    @pytest.mark.parametrize("query", ["until=x", "until=" + "9" * 18, "skip=-1", "skip=" + "9" * 40, "table=user"])
    def test_an_address_that_makes_no_sense_is_answered(self, admin_client: Client, query: str) -> None:
        rule()
        assert admin_client.get(f"{CHANGES}?{query}").status_code == 200

    def test_a_row_of_a_plan_that_was_deleted_is_still_named(self, admin_client: Client) -> None:
        plan = Plan.objects.create(name="Gone", slug="gone")
        rule(plan=plan)
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=5)
        plan.delete()
        page = text(admin_client.get(CHANGES))
        assert "rule burst (Gone) deleted" in page
        assert "included quantity 5 requests (Gone) deleted" in page
        assert "plan: Gone" in page

    def test_the_number_of_queries_does_not_grow(self, admin_client: Client) -> None:
        counts = []
        for number in range(2):
            plan = Plan.objects.create(name=f"p{number}", slug=f"p{number}")
            for kind in range(1 + 9 * number):
                row = rule(f"r{number}-{kind}", plan=plan)
                Rule.objects.filter(pk=row.pk).update(capacity=20)
                PlanInclusion.objects.create(plan=plan, meter=f"m{kind}", quantity=5)
                Account.objects.create(identifier=f"{number}-{kind}", plan=plan)
            admin_client.get(CHANGES)
            with CaptureQueriesContext(connection) as queries:
                admin_client.get(CHANGES)
            counts.append(len(queries))
        assert counts[0] == counts[1]


class TestAPlansHistory:
    def test_it_includes_what_the_plan_includes_and_its_prices(self, admin_client: Client) -> None:
        plan, other = (Plan.objects.create(name=slug, slug=slug, currency="EUR") for slug in ("pro", "free"))
        inclusion = PlanInclusion.objects.create(plan=plan, meter="requests", quantity=10_000)
        PlanInclusion.objects.create(plan=other, meter="tokens", quantity=77)
        plan.prices.create(meter="requests", unit_price="0.10")
        PlanInclusion.objects.filter(pk=inclusion.pk).update(quantity=20_000)
        page = text(admin_client.get(f"{PLANS}{plan.pk}/history/"))
        assert "What the plan includes, and its prices" in page
        assert "quantity: 10,000 → 20,000" in page
        assert "unit price: 0.1" in page
        assert "77" not in page

    def test_an_included_quantity_that_was_deleted_is_in_it_with_the_reason(self, admin_client: Client) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        inclusion = PlanInclusion.objects.create(plan=plan, meter="requests", quantity=10_000)
        with because("OPS-9"):
            inclusion.delete()
        page = text(admin_client.get(f"{PLANS}{plan.pk}/history/"))
        assert "deleted" in page
        assert "OPS-9" in page

    def test_it_says_if_there_are_more_changes(self, admin_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(accounts, "PER_PAGE", 2)
        plan = Plan.objects.create(name="Pro", slug="pro")
        for number, more in ((1, False), (2, False), (3, True)):
            PlanInclusion.objects.create(plan=plan, meter=f"m{number}", quantity=5)
            page = text(admin_client.get(f"{PLANS}{plan.pk}/history/"))
            assert ("These are the newest 2 changes. “All changes” lists the others." in page) == more

    def test_it_is_for_those_who_may_view_the_plan(self, client: Client) -> None:
        plan = Plan.objects.create(name="pro", slug="pro")
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=10_000)
        url = f"{PLANS}{plan.pk}/history/"
        assert user_with(client, "view_rule", "view_change").get(url).status_code == 403
        assert "requests" not in client.get(CHANGES).content.decode()


def test_every_table_with_a_version_has_a_history() -> None:
    rule()
    names = {model.__name__ for model in audited_models()}
    assert {"Rule", "Plan", "PlanInclusion", "PlanPrice", "PlanMembership", "Account", "KeyOverride"} <= names
    assert len(changed_rows(audited_models(), timezone.now(), 0, 10)) == 1
