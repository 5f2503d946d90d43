"""Test what the admin says of changes: the reason on each form, the page of all changes, and a plan's whole history."""

from __future__ import annotations

import re
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
from ratelimits.admin.changes.rows import changed_rows
from ratelimits.billing.models import PlanPrice
from ratelimits.models import Access, Account, ConfigVersion, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.models.history import because
from ratelimits.models.versioned import versioned_models
from tests.admin.test_rules import BUCKET, RULES, text
from tests.support.own_apps import list_path
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

CHANGES = reverse("admin:ratelimits_change_changelist")
PLANS = "/admin/ratelimits/plan/"
#: The tables whose rows are edited on the page of their plan.
PARTS_OF_PLANS: set[Any] = {PlanInclusion, PlanPrice}
INLINES = {f"{name}-{count}_FORMS": "0" for name in ("inclusions", "prices") for count in ("TOTAL", "INITIAL")}


def newest_kind(client: Client) -> str:
    """Return what the page of all changes says of the newest change, such as "changed back"."""
    return str(client.get(CHANGES).context["changes"][0].row.did)


def reasons(model: Any) -> list[str | None]:
    """Return the reasons of all records of a table, the newest first."""
    return list(model.history.order_by("-history_id").values_list("history_change_reason", flat=True))


def undo_url(record: Any) -> str:
    """Return the page that undoes the change of a history's record."""
    return reverse("admin:ratelimits_change_undo", args=[record.instance_type._meta.model_name, record.history_id])


def user_with(client: Client, *permissions: str) -> Client:
    user, _made = User.objects.get_or_create(username="some", is_staff=True)
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
            start = list_path(one._meta.model_name)
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

    def test_only_a_change_that_restores_the_former_state_is_named_so(self, admin_client: Client) -> None:
        row = rule("burst", "fixed_window", capacity=10, period=60)
        named = []
        for capacity in (20, 20, 30, 20, 10):
            row.capacity = capacity
            row.save()
            named.append(newest_kind(admin_client))
        assert named == ["changed", "changed", "changed", "changed back", "changed"]

    def test_a_change_whose_record_before_it_was_removed_shows_no_values(self, admin_client: Client) -> None:
        row = rule("burst", "fixed_window", capacity=10, period=60)
        Rule.objects.filter(pk=row.pk).update(capacity=20)
        row.history.filter(history_type="+").delete()
        page = text(admin_client.get(CHANGES))
        assert "The values before the change are not known." in page
        assert "→ 20" not in page

    def test_a_capacity_of_zero_is_said(self, admin_client: Client) -> None:
        rule("block", "fixed_window", capacity=0)
        page = text(admin_client.get(CHANGES))
        assert "capacity: 0" in page
        assert "bills" not in page

    def test_each_change_has_a_link_that_undoes_it(self, admin_client: Client) -> None:
        changed, deleted, added = rule("a"), rule("b"), rule("c")
        Rule.objects.filter(pk=changed.pk).update(capacity=20)
        pk = deleted.pk
        deleted.delete()
        page = admin_client.get(CHANGES).content.decode()
        assert f'<a href="{undo_url(changed.history.latest())}">Undo</a>' in page
        gone = Rule.history.get(id=pk, history_type="-")
        assert f'<a href="{undo_url(gone)}">Undo: add the rule again</a>' in page
        delete = reverse("admin:ratelimits_rule_delete", args=[added.pk])
        assert f'<a href="{delete}">Undo: delete the rule, which then limits nothing</a>' in page
        assert admin_client.get(delete).status_code == 200
        # A change after which the row was changed again says so, and opens the whole form.
        Rule.objects.filter(pk=changed.pk).update(capacity=30)
        assert ">State before the change</a>" in admin_client.get(CHANGES).content.decode()

    def test_where_there_is_no_link_it_says_why(self, client: Client) -> None:
        row, gone = rule("a"), rule("b")
        Rule.objects.filter(pk=row.pk).update(capacity=20)
        pk = gone.pk
        gone.delete()
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=5)
        block = Access.objects.create(target="user:1", reason="r")

        def cells(*permissions: str) -> list[str]:
            page = user_with(client, "view_change", "view_rule", "view_plan", *permissions).get(CHANGES)
            return [change.undo for change in page.context["changes"]]

        assert cells() == [
            "Change this row back on the page of its plan.",
            "You may not delete the plan.",
            "You may not change the rule.",
            "You may not change the rule.",
            "The rule was changed or deleted later: see the later changes.",
            "The rule was changed or deleted later: see the later changes.",
        ]
        assert cells("change_rule")[2:4] == ["You may not add the rule again.", "Undo"]
        (end, *_others) = user_with(client, "view_change", "operate").get(CHANGES).context["changes"]
        assert (end.undo, end.undo_url) == (
            "Undo: end the block or allow now",
            reverse("admin:ratelimits_access_end", args=[block.pk]),
        )
        restored = Rule.history.filter(id=pk, history_type="-").get()
        restored.instance.save()
        assert "The rule was added again later." in cells("change_rule", "add_rule")

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


class TestUndoing:
    def test_it_shows_what_changes_back_and_asks_once(self, admin_client: Client) -> None:
        row = rule("burst", "fixed_window", key_kind="user", capacity=10, period=60)
        typed = {**BUCKET, "algorithm": "fixed_window", "rate": "", "capacity": "20", "period": "60"}
        admin_client.post(f"{RULES}{row.pk}/change/", {**typed, "key_kind": "user", "change_reason": "OPS-1"})
        url, before = undo_url(row.history.latest()), row.history.count()
        page = admin_client.get(url)
        said = text(page)
        assert "Undo the change of rule burst" in said
        assert f'<a href="{RULES}">Rules</a>' in page.content.decode(), "the breadcrumb leads to the rules"
        assert "rule burst was changed at" in said
        assert "by admin. Reason: OPS-1" in said
        assert "field now after undoing capacity 20 10 " in said, "only what changed"
        assert "10 requests per minute" in said
        assert "Applies to 0 keys of the last 24 hours." in said
        assert page.content.decode().count('value="Undo the change of rule burst"') == 1
        assert 'name="capacity"' not in page.content.decode()
        admin_client.post(url, {"change_reason": "x"})
        assert row.history.count() == before, "not confirmed"
        done = admin_client.post(url, {"_confirmed": "1", "change_reason": "OPS-2"}, follow=True)
        assert done.redirect_chain == [(CHANGES, 302)]
        assert "Undone: burst has its former values again." in done.content.decode()
        row.refresh_from_db()
        record = row.history.latest()
        assert (row.capacity, record.history_change_reason, record.history_user.username) == (10, "OPS-2", "admin")
        assert row.version == record.version == ConfigVersion.read("default")[0]
        # To undo is a change, which can be undone too.
        assert admin_client.post(undo_url(record), {"_confirmed": "1"}).status_code == 302
        row.refresh_from_db()
        assert row.capacity == 20

    @pytest.mark.parametrize("model", [Rule, Plan, Account, KeyOverride, PlanMembership, Access])
    def test_a_change_of_each_table_is_undone(self, admin_client: Client, model: Any) -> None:
        rule()
        plan = Plan.objects.create(name="Pro", slug="pro")
        row, name, value = {
            Rule: lambda: (Rule.objects.get(), "rate", 7),
            Plan: lambda: (plan, "name", "Gold"),
            Account: lambda: (Account.objects.create(identifier="7", name="A"), "name", "B"),
            KeyOverride: lambda: (KeyOverride.objects.create(key="user:1", rule="burst", capacity=5), "capacity", 6),
            PlanMembership: lambda: (PlanMembership.objects.create(key="user:1", plan=plan), "plan", None),
            Access: lambda: (Access.objects.create(target="user:1", reason="a"), "reason", "b"),
        }[model]()
        value = value or Plan.objects.create(name="Free", slug="free")
        former = getattr(row, name)
        setattr(row, name, value)
        row.save()
        url = undo_url(row.history.latest())
        assert admin_client.get(url).status_code == 200
        assert admin_client.post(url, {"_confirmed": "1"}).status_code == 302
        row = model.objects.get(pk=row.pk)
        assert getattr(row, name) == former
        assert newest_kind(admin_client) == "changed back"
        if model is Plan:
            PlanMembership.objects.all().delete()
        pk = row.pk
        row.delete()
        url = undo_url(model.history.filter(id=pk).latest())
        said = text(admin_client.get(url))
        assert "Undo: add" in said
        assert ("The plan comes back without its included quantities and prices" in said) == (model is Plan)
        assert admin_client.post(url, {"_confirmed": "1"}).status_code == 302
        assert getattr(model.objects.get(pk=pk), name) == former
        assert newest_kind(admin_client) == "added again"
        assert [record.history_type for record in model.history.filter(id=pk).order_by("-history_id")[:2]] == ["+", "-"]

    def test_a_block_that_was_ended_says_what_it_does_again(self, admin_client: Client) -> None:
        row = Access.objects.create(target="ip:203.0.113.0/24", reason="a scan")
        row.end("over")
        said = text(admin_client.get(undo_url(row.history.latest())))
        assert "Every request of ip:203.0.113.0/24 is refused with 403" in said
        assert "The network has 256 addresses." in said

    def test_a_rule_that_would_refuse_everyone_again_is_warned_of(self, admin_client: Client) -> None:
        row = rule("shut", "fixed_window", capacity=0, period=60, key_kind="ip")
        Rule.objects.filter(pk=row.pk).update(capacity=5)
        page = admin_client.get(undo_url(row.history.latest())).content.decode()
        assert re.search(r'<p class="errornote">[^<]*Everyone would be refused.', page)

    def test_only_the_last_change_of_a_row_is_undone(self, admin_client: Client) -> None:
        row = rule("a")
        Rule.objects.filter(pk=row.pk).update(capacity=20)
        url = undo_url(row.history.latest())
        Rule.objects.filter(pk=row.pk).update(capacity=30)
        for response in (admin_client.get(url), admin_client.post(url, {"_confirmed": "1"})):
            assert response["Location"] == f"{RULES}{row.pk}/history/"
        row.refresh_from_db()
        assert (row.capacity, row.version) == (30, ConfigVersion.read("default")[0]), "no version was used up"

    def test_former_values_that_are_no_longer_valid_lead_to_the_form(self, admin_client: Client) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        row = rule("a", plan=plan)
        pk, former = row.pk, row.history.latest().pk
        row.delete()
        gone = Rule.history.get(id=pk, history_type="-")
        plan.delete()
        form = reverse("admin:ratelimits_rule_simple_history", args=[pk, gone.pk])
        for response in (admin_client.get(undo_url(gone)), admin_client.post(undo_url(gone), {"_confirmed": "1"})):
            assert response["Location"] == form
        assert not Rule.objects.exists()
        assert former != gone.pk
        assert "The former values are no longer valid." in admin_client.get(form).content.decode()

    @pytest.mark.parametrize("path", ["rule/1/", f"rule/{10**30}/", "user/1/", "report/1/", "nothing/1/"])
    def test_an_address_that_names_no_change_is_not_found(self, admin_client: Client, path: str) -> None:
        assert admin_client.get(f"{CHANGES}undo/{path}").status_code == 404

    def test_an_added_row_is_undone_on_the_page_that_deletes_it(self, admin_client: Client) -> None:
        assert admin_client.post(undo_url(rule().history.latest()), {"_confirmed": "1"}).status_code == 404

    def test_it_is_for_those_who_may_change_the_row(self, client: Client) -> None:
        row, gone, block = rule("a"), rule("b"), Access.objects.create(target="user:1", reason="r")
        Rule.objects.filter(pk=row.pk).update(capacity=20)
        pk = gone.pk
        gone.delete()
        block.end("over")
        changed, deleted = undo_url(row.history.latest()), undo_url(Rule.history.filter(id=pk).latest())
        ended = undo_url(block.history.latest())
        everything = {"view_change", "view_rule", "delete_rule", "add_rule", "change_plan", "view_access", "finalise"}
        for permissions, allowed in (
            (everything, set()),
            (everything - {"add_rule"} | {"change_rule"}, {changed}),
            ({"add_rule", "change_rule"}, {changed, deleted}),
            ({"operate"}, {ended}),
        ):
            user_with(client, *permissions)
            for url in (changed, deleted, ended):
                assert client.get(url).status_code == (200 if url in allowed else 403), (permissions, url)
                if url not in allowed:
                    assert client.post(url, {"_confirmed": "1"}).status_code == 403, (permissions, url)
        row.refresh_from_db()
        block.refresh_from_db()
        assert row.capacity == 20
        assert block.valid_until is not None
        assert client.post(ended, {"_confirmed": "1"})["Location"] == reverse("admin:ratelimits_access_changelist")
        client.logout()
        assert client.get(changed)["Location"].startswith("/admin/login/")


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
            note = "These are the newest 2 changes. The page “All changes” lists the older changes too."
            assert (note in page) == more

    def test_it_is_for_those_who_may_view_the_plan(self, client: Client) -> None:
        plan = Plan.objects.create(name="pro", slug="pro")
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=10_000)
        url = f"{PLANS}{plan.pk}/history/"
        assert user_with(client, "view_rule", "view_change").get(url).status_code == 403
        assert "requests" not in client.get(CHANGES).content.decode()


def test_every_table_with_a_version_has_a_history() -> None:
    rule()
    names = {model.__name__ for model in versioned_models()}
    of_plans = {"Plan", "PlanInclusion", "PlanPrice", "PlanMembership"}
    assert names == {"Access", "Account", "KeyOverride", "Rule", *of_plans}
    assert len({model.history.model for model in versioned_models()}) == len(names)
    assert len(changed_rows(versioned_models(), timezone.now(), 0, 10)) == 1
