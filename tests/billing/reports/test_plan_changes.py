"""Test that a plan changes at the end of a billing period, and that an edit names the past months that it changes."""

from __future__ import annotations

import html
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from ratelimits.billing import jobs as billing
from ratelimits.billing.models import PlanPrice, Report
from ratelimits.billing.verification import Verification
from ratelimits.models import Account, ConfigVersion, FrozenPeriod, Plan
from ratelimits.models.periods import plan_changes
from ratelimits.moments import moment
from ratelimits.usage import jobs
from tests.support.reports.edits import edit_at, plan, spend
from tests.support.reports.invoices import account, close
from tests.support.reports.priced import priced
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

#: Half past midnight on 1 February in UTC: in New York it is still January.
HALF_PAST = "2026-02-01T00:30"


def included() -> list[tuple[str, str, int]]:
    rows = Report.objects.order_by("period_start").values_list("label", "plan", "included")
    return [(label, slug, included["requests"]) for label, slug, included in rows]


@pytest.mark.parametrize("applied", ["2026-02-01T05:00", "2026-02-20T00:00"], ids=["in time", "days later"])
def test_the_next_plan_begins_at_the_end_of_the_period_whenever_it_is_applied(applied: str) -> None:
    with edit_at(0):
        small, large = plan("small", 10), plan("large", 1000)
    with edit_at("2025-06-01"):
        acme = Account.objects.create(identifier="acme", plan=small, timezone="America/New_York")
    spend("acme", "2026-01-15", 7)
    flow()
    with edit_at("2026-01-20"):
        acme.next_plan = large
        plan_changes.schedule(acme, at("2026-01-20"))
        acme.save()
    assert acme.next_plan_at == moment(at("2026-02-01T05:00"))
    assert plan_changes.apply_due("default", at("2026-02-01T04:59:59")) == 0
    spend("acme", "2026-02-15", 7)
    assert plan_changes.apply_due("default", at(applied)) == 1
    assert plan_changes.apply_due("default", at(applied)) == 0
    acme.refresh_from_db()
    assert (acme.plan_id, acme.next_plan_id, acme.since) == (large.pk, None, at("2026-02-01T05:00"))
    assert acme.next_plan_at is None
    close("2026-03-05")
    assert included() == [("2026-01", "small", 10), ("2026-02", "large", 1000)]
    assert list(Verification().findings()) == []


def test_code_that_names_only_the_plan_gets_the_moment_from_the_next_job() -> None:
    large = plan("large", 1000)
    acme = account()
    Account.objects.filter(pk=acme.pk).update(next_plan=large)
    assert plan_changes.apply_due("default", at("2026-01-20")) == 0
    acme.refresh_from_db()
    assert acme.next_plan_at == moment(at("2026-02-01"))
    for job in (jobs.drain, lambda: list(billing.finalise())):
        Account.objects.filter(pk=acme.pk).update(plan=None, next_plan=large, next_plan_at=moment(at("2025-02-01")))
        job()
        acme.refresh_from_db()
        assert (acme.plan, acme.next_plan) == (large, None)
    with pytest.raises(ValidationError, match="already on this plan"):
        Account(identifier="other", plan=large, next_plan=large).full_clean()


def test_staff_choose_the_next_plan_on_the_account_s_page(admin_client: Client) -> None:
    large, acme = plan("large", 1000), account(included=5, timezone="Asia/Tokyo")
    change = reverse("admin:ratelimits_account_change", args=[acme.pk])
    typed = {"identifier": "acme", "plan": acme.plan_id, "timezone": "Asia/Tokyo", "next_plan": large.pk}
    assert admin_client.post(change, typed).status_code == 302
    acme.refresh_from_db()
    assert (acme.next_plan, acme.plan_id) == (large, typed["plan"])
    assert acme.next_plan_at is not None
    page = admin_client.get(change).content.decode()
    assert " 00:00 Asia/Tokyo" in page
    assert admin_client.post(change, {**typed, "next_plan": ""}).status_code == 302
    acme.refresh_from_db()
    assert (acme.next_plan, acme.next_plan_at) == (None, None)


class TestQuestions:
    @pytest.fixture(autouse=True)
    def _half_past(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let January have usage of accounts in New York and Berlin, and let it be half past midnight in UTC."""
        for name, zone in (("acme", "America/New_York"), ("globex", "Europe/Berlin")):
            priced(name, included=10, unit_price="1")
            with edit_at(0):
                Account.objects.filter(identifier=name).update(timezone=zone)
            spend(name, "2026-01-15", 900)
        flow()
        monkeypatch.setattr("ratelimits.billing.admin.past_months.time_ns", lambda: at(HALF_PAST) * 1000)
        monkeypatch.setattr("ratelimits.moments.now", lambda: moment(at(HALF_PAST)))

    def post(self, client: Client, url: str, typed: dict[str, Any]) -> Any:
        """Post a form so that the edit is made at half past midnight."""
        with edit_at(HALF_PAST):
            return client.post(url, typed)

    def form(self, slug: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        row = Plan.objects.get(slug=slug)
        inclusion, price = row.inclusions.get(), row.prices.get()
        typed: dict[str, Any] = {"name": row.name, "slug": slug, "currency": "EUR"}
        for name, part, values in (
            ("inclusions", inclusion, {"meter": "requests", "quantity": "10"}),
            (
                "prices",
                price,
                {"meter": "requests", "pricing": "per_unit", "unit_price": "1", "tiers": "", "fees_due": "usage"},
            ),
        ):
            typed |= {f"{name}-TOTAL_FORMS": "1", f"{name}-INITIAL_FORMS": "1", f"{name}-0-id": part.pk}
            typed |= {f"{name}-0-{field}": text for field, text in values.items()} | {f"{name}-0-plan": row.pk}
        typed |= {"prices-0-flat_fee": "0", "prices-0-minimum": "0"}
        return reverse("admin:ratelimits_plan_change", args=[row.pk]), {**typed, **fields}

    def test_an_edit_of_a_plan_says_which_past_months_it_changes_before_it_is_saved(self, admin_client: Client) -> None:
        url, typed = self.form("plan-acme", **{"prices-0-unit_price": "2"})
        page = self.post(admin_client, url, typed)
        said = html.unescape(page.content.decode())
        assert "This edit changes bills of a past month" in said
        assert page.context["consequences"].rows == [
            (
                "acme",
                "January 2026",
                "2026-02-01 00:00 America/New_York",
                "890 requests, 890.00 EUR",
                "890 requests, 1780.00 EUR",
            )
        ]
        assert PlanPrice.objects.get(plan__slug="plan-acme").unit_price == 1
        assert self.post(admin_client, url, {**typed, "_confirmed": "1"}).status_code == 302
        assert PlanPrice.objects.get(plan__slug="plan-acme").unit_price == 2

    def test_an_included_quantity_too(self, admin_client: Client) -> None:
        url, typed = self.form("plan-acme", **{"inclusions-0-quantity": "1000"})
        page = self.post(admin_client, url, typed)
        assert [row[3:] for row in page.context["consequences"].rows] == [("890 requests, 890.00 EUR", "0.00 EUR")]

    def test_where_the_month_is_over_and_where_nothing_changes_it_does_not_ask(self, admin_client: Client) -> None:
        for url, typed in (
            self.form("plan-globex", **{"prices-0-unit_price": "2"}),
            self.form("plan-acme", name="Another name"),
            (reverse("admin:ratelimits_account_add"), {"identifier": "new", "timezone": "America/New_York"}),
        ):
            assert self.post(admin_client, url, typed).status_code == 302

    def test_if_there_are_too_many_accounts_to_compare_it_asks(
        self, admin_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ratelimits.billing.admin.past_months._MAX_LISTED", 0)
        url, typed = self.form("plan-acme", name="Another name")
        page = self.post(admin_client, url, typed)
        assert "The bills of the others were not compared." in page.content.decode()
        assert "This edit changes bills" not in page.content.decode()
        assert self.post(admin_client, url, {**typed, "_confirmed": "1"}).status_code == 302

    def test_an_edit_of_an_account_says_it_too(self, admin_client: Client) -> None:
        acme, large = Account.objects.get(identifier="acme"), plan("large", 1000)
        url = reverse("admin:ratelimits_account_change", args=[acme.pk])
        typed = {"identifier": "acme", "plan": large.pk, "timezone": acme.timezone}
        page = self.post(admin_client, url, typed)
        assert [row[3:] for row in page.context["consequences"].rows] == [("890 requests, 890.00 EUR", "–")]
        acme.refresh_from_db()
        assert acme.plan_id != large.pk
        # To choose the plan for the next period changes no bill of January.
        assert self.post(admin_client, url, {**typed, "plan": acme.plan_id, "next_plan": large.pk}).status_code == 302

    #: The rows of the question when `acme` goes back from a plan that includes all of its usage.
    BACK = (("acme", "January 2026", "2026-02-01 00:00 America/New_York", "–", "890 requests, 890.00 EUR"),)

    def undo_url(self, model: type[Account | Plan]) -> str:
        newest = model.history.latest("history_id").history_id
        return reverse("admin:ratelimits_change_undo", args=[model._meta.model_name, newest])

    def undo_page(self, client: Client, model: type[Account | Plan]) -> Any:
        """Return the page that asks before an undo, at half past midnight. It saves nothing."""
        changes, version = model.history.count(), ConfigVersion.read("default")
        client.get(self.undo_url(model))
        assert ConfigVersion.read("default") == version
        with edit_at(HALF_PAST):
            page = client.get(self.undo_url(model))
        assert model.history.count() == changes
        return page

    def test_an_undo_says_it_too(self, admin_client: Client) -> None:
        acme = Account.objects.get(identifier="acme")
        with edit_at(HALF_PAST):
            Account.objects.filter(pk=acme.pk).update(plan=plan("large", 1000))
        page = self.undo_page(admin_client, Account)
        assert tuple(page.context["bills"].rows) == self.BACK
        said = html.unescape(page.content.decode())
        assert "This edit changes bills of a past month" in said
        assert "<td>890 requests, 890.00 EUR</td>" in said
        assert Account.objects.get(pk=acme.pk).plan_id != acme.plan_id
        assert self.post(admin_client, self.undo_url(Account), {"_confirmed": "1"}).status_code == 302
        assert Account.objects.get(pk=acme.pk).plan_id == acme.plan_id

    def test_an_undo_of_an_edit_of_a_plan_too(self, admin_client: Client) -> None:
        with edit_at(HALF_PAST):
            Plan.objects.filter(slug="plan-acme").update(currency="USD")
        page = self.undo_page(admin_client, Plan)
        assert [row[3:] for row in page.context["bills"].rows] == [
            ("890 requests, 890.00 USD", "890 requests, 890.00 EUR")
        ]

    def test_an_undo_that_changes_no_bill_of_a_past_month_does_not_say_it(self, admin_client: Client) -> None:
        for name, fields in (("acme", {"name": "Acme"}), ("globex", {"plan": plan("large", 1000)})):
            with edit_at(HALF_PAST):
                Account.objects.filter(identifier=name).update(**fields)
            assert self.undo_page(admin_client, Account).context["bills"] is None
        with edit_at(HALF_PAST):
            Account.objects.get(identifier="acme").delete()
        # A deleted account keeps the plan that it had in the period.
        assert self.undo_page(admin_client, Account).context["bills"] is None
        assert not Account.objects.filter(identifier="acme").exists()

    @pytest.mark.parametrize(
        ("slug", "after"), [("plan-acme", None), ("large", "–")], ids=["on its former plan", "on another plan"]
    )
    def test_a_deleted_account_that_is_added_again_says_it_too(
        self, admin_client: Client, slug: str, after: str | None
    ) -> None:
        plan("large", 1000)
        with edit_at(HALF_PAST):
            Account.objects.get(identifier="acme").delete()
        typed = {"identifier": "acme", "plan": Plan.objects.get(slug=slug).pk, "timezone": "America/New_York"}
        page = self.post(admin_client, reverse("admin:ratelimits_account_add"), typed)
        rows = [row[3:] for row in page.context["consequences"].rows]
        assert rows == ([] if after is None else [("890 requests, 890.00 EUR", after)])
        assert ("This edit changes bills of a past month" in page.content.decode()) == (after is not None)
        assert not Account.objects.filter(identifier="acme").exists()

    def test_a_new_plan_has_no_bills_yet(self, admin_client: Client) -> None:
        typed = {"name": "New", "slug": "new", "currency": "EUR"}
        for name in ("inclusions", "prices"):
            typed |= {f"{name}-TOTAL_FORMS": "0", f"{name}-INITIAL_FORMS": "0"}
        assert self.post(admin_client, reverse("admin:ratelimits_plan_add"), typed).status_code == 302

    def test_a_former_state_says_it_too(self, admin_client: Client) -> None:
        acme = Account.objects.get(identifier="acme")
        first = Account.history.filter(id=acme.pk).latest("history_id").history_id
        with edit_at(HALF_PAST):
            Account.objects.filter(pk=acme.pk).update(plan=plan("large", 1000))
        url = reverse("admin:ratelimits_account_simple_history", args=[acme.pk, first])
        page = self.post(admin_client, url, {"plan": acme.plan_id, "timezone": acme.timezone})
        assert tuple(page.context["consequences"].rows) == self.BACK
        assert Account.objects.get(pk=acme.pk).plan_id != acme.plan_id

    def shown_file(self, client: Client, *lines: str) -> Any:
        file = SimpleUploadedFile("rows.csv", "\n".join(["identifier,name,plan,timezone", *lines]).encode())
        with edit_at(HALF_PAST):
            return client.post(reverse("admin:ratelimits_account_import"), {"file": file}, follow=True)

    def test_a_file_says_it_too(self, admin_client: Client) -> None:
        large = plan("large", 1000)
        lines = ["globex,,large,Europe/Berlin", "new,,large,America/New_York", "wrong,,unknown,UTC"]
        page = self.shown_file(admin_client, "acme,,large,America/New_York", *lines)
        assert [row[3:] for row in page.context["bills"].rows] == [("890 requests, 890.00 EUR", "–")]
        said = html.unescape(page.content.decode())
        assert "This edit changes bills of a past month" in said
        assert "<td>890 requests, 890.00 EUR</td>" in said
        assert not Account.objects.filter(plan=large).exists()
        version, url = ConfigVersion.read("default"), page.redirect_chain[-1][0]
        assert admin_client.get(url).status_code == 200
        assert ConfigVersion.read("default") == version
        typed = {name: page.context["form"].initial[name] for name in ("digest", "version")}
        assert self.post(admin_client, url, {**typed, "good_only": "1"}).status_code == 302
        assert Account.objects.filter(plan=large).count() == 3
        # Now the file changes nothing, and these lines no bill of January.
        for line in ("acme,,large,America/New_York", "globex,,plan-globex,Europe/Berlin", "new,,plan-acme,UTC"):
            assert self.shown_file(admin_client, line).context["bills"] is None

    def test_a_file_is_tried_only_for_the_first_page_and_only_where_a_line_can_change_a_bill(
        self, admin_client: Client
    ) -> None:
        def written(url: str) -> list[str]:
            with edit_at(HALF_PAST), CaptureQueriesContext(connection) as queries:
                assert admin_client.get(url).status_code == 200
            statements = [query["sql"] for query in queries if query["sql"].startswith(("INSERT", "UPDATE"))]
            return [sql for sql in statements if "django_session" not in sql]

        plan("large", 1000)
        lines = ("acme,Acme,plan-acme,America/New_York", "globex,Globex,large,Europe/Berlin")
        url = self.shown_file(admin_client, *lines).redirect_chain[-1][0]
        tried = " ".join(written(url))
        assert "'globex'" in tried
        assert "'acme'" not in tried
        assert written(f"{url}&show=changed") == written(f"{url}&show=changed&page=2") == []
        url = self.shown_file(admin_client, lines[0]).redirect_chain[-1][0]
        assert written(url) == []

    def test_a_file_with_too_many_accounts_to_compare_says_nothing_of_the_others(
        self, admin_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ratelimits.billing.admin.past_months._MAX_LISTED", 1)
        new = [f"aaa-{n},,,America/New_York" for n in range(2)]
        bills = self.shown_file(admin_client, *new, "acme,Acme,,America/New_York").context["bills"]
        assert (len(bills.warnings), bills.rows) == (1, [])
        assert "The bills of the others were not compared." in bills.warnings[0]

    def test_without_bills_it_does_not_ask_about_them(self, admin_client: Client, no_bills: None) -> None:
        url, typed = self.form("plan-acme", **{"prices-0-unit_price": "2"})
        assert self.post(admin_client, url, typed).status_code == 302


class TestTerms:
    """An edit of the time zone or of the anchor on an account's page says first which periods it gives."""

    NEXT = "The next billing period begins then, at "

    @pytest.fixture(autouse=True)
    def _in_january(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ratelimits.moments.now", lambda: moment(at("2026-01-20")))

    def asked(self, client: Client, account: Account | None, **typed: str) -> list[str]:
        """Return what the page says before the edit is saved; [] if it asks nothing. Then confirm."""
        url = reverse("admin:ratelimits_account_add")
        if account is not None:
            url = reverse("admin:ratelimits_account_change", args=[account.pk])
        with edit_at("2026-01-20"):
            answer = client.post(url, typed)
        if answer.status_code == 302:
            return []
        warnings: list[str] = answer.context["consequences"].warnings
        with edit_at("2026-01-20"):
            assert client.post(url, {**typed, "_confirmed": "1"}).status_code == 302
        return warnings

    def test_a_used_period_stays_and_the_next_one_is_named_in_the_new_zone(self, admin_client: Client) -> None:
        acme = account()
        spend("acme", "2026-01-15")
        flow()
        assert self.asked(admin_client, acme, timezone="UTC", name="Acme") == []
        new_york = {"timezone": "America/New_York", "name": "Acme"}
        stays = "The present billing period stays as it is. It ends at 2026-02-01 00:00 UTC."
        # The months of New York start five hours later: less than two days from the frozen period, so not this time.
        assert self.asked(admin_client, acme, **new_york) == [
            stays,
            f"{self.NEXT}2026-01-31 19:00 America/New_York, and ends at 2026-03-01 00:00 America/New_York.",
        ]
        assert self.asked(admin_client, acme, **new_york, billing_anchor="2026-01-10T06:00") == [
            stays,
            f"{self.NEXT}2026-01-31 19:00 America/New_York, and ends at 2026-02-10 06:00 America/New_York.",
        ]
        spend("acme", "2026-02-05")
        flow()
        (frozen,) = FrozenPeriod.objects.filter(label="2026-02")
        assert (frozen.start, frozen.end) == (at("2026-02-01"), at("2026-02-10T11:00"))

    def undo(self, client: Client) -> list[str]:
        """Return what the page that undoes the newest change says. Then confirm."""
        url = reverse("admin:ratelimits_change_undo", args=["account", Account.history.latest("history_id").history_id])
        with edit_at("2026-01-20"):
            warnings: list[str] = client.get(url).context["consequences"].warnings
            assert client.post(url, {"_confirmed": "1"}).status_code == 302
        return warnings

    def edit(self, **values: str) -> None:
        account = Account.objects.get()
        for name, value in values.items():
            setattr(account, name, value)
        with edit_at("2026-01-20"):
            account.save()

    def test_an_undo_says_the_same(self, admin_client: Client) -> None:
        acme = account()
        spend("acme", "2026-01-15")
        flow()
        self.edit(name="Acme")
        assert self.undo(admin_client) == []
        self.edit(billing_anchor="2026-01-10T00:00")
        stays = "The present billing period stays as it is. It ends at 2026-02-01 00:00 UTC."
        assert self.undo(admin_client) == [
            stays,
            f"{self.NEXT}2026-02-01 00:00 UTC, and ends at 2026-03-01 00:00 UTC.",
        ]
        self.edit(timezone="Europe/Berlin")
        with edit_at("2026-01-20"):
            Account.objects.get().delete()
        assert self.undo(admin_client) == [
            stays,
            f"{self.NEXT}2026-02-01 01:00 Europe/Berlin, and ends at 2026-03-01 00:00 Europe/Berlin.",
        ]
        assert Account.objects.get() == acme
        spend("acme", "2026-02-05")
        flow()
        (frozen,) = FrozenPeriod.objects.filter(label="2026-02")
        assert (frozen.start, frozen.end) == (at("2026-02-01"), at("2026-02-28T23:00"))

    def test_a_file_says_the_same(self, admin_client: Client) -> None:
        for name in ("acme", "idle", "same"):
            account(name)
        for name in ("acme", "same", "rowless"):
            spend(name, "2026-01-15")
        flow()
        lines = ["identifier,name,timezone", "acme,,Asia/Tokyo", "idle,,Asia/Tokyo", "same,Same,UTC"]
        lines += ["rowless,,Asia/Tokyo", "new,,Asia/Tokyo"]
        file = SimpleUploadedFile("rows.csv", "\n".join(lines).encode())
        shown = admin_client.post(reverse("admin:ratelimits_account_import"), {"file": file}, follow=True)
        assert shown.context["terms"].count == 3
        stays = "The present billing period stays as it is. It ends at 2026-02-01 00:00 UTC."
        # The months of Tokyo start nine hours before those of UTC: less than two days from the frozen period.
        short = f"{self.NEXT}2026-02-01 09:00 Asia/Tokyo, and ends at 2026-03-01 00:00 Asia/Tokyo."
        unused = "No billing period was used yet, so the edit applies to all of them. The present one lasts from "
        begins = f"{self.NEXT}2026-02-01 00:00 Asia/Tokyo, and ends at 2026-03-01 00:00 Asia/Tokyo."
        assert shown.context["terms"].first == [
            (2, f"{stays} {short}"),
            (3, f"{unused}2026-01-01 00:00 to 2026-02-01 00:00 Asia/Tokyo. {begins}"),
            (5, f"{stays} {short}"),
        ]
        page = html.unescape(shown.content.decode())
        assert "3 lines change the billing periods of accounts." in page
        assert f"Line 2: {stays}" in page
        assert Account.objects.filter(timezone="Asia/Tokyo").count() == 0

    def test_a_former_state_says_the_same(self, admin_client: Client) -> None:
        acme = account()
        spend("acme", "2026-01-15")
        flow()
        first = Account.history.latest("history_id").history_id
        self.edit(billing_anchor="2026-01-10T00:00")
        url = reverse("admin:ratelimits_account_simple_history", args=[acme.pk, first])
        with edit_at("2026-01-20"):
            asked = admin_client.post(url, {"timezone": "UTC", "name": ""})
        assert asked.context["consequences"].warnings[:2] == [
            "The present billing period stays as it is. It ends at 2026-02-01 00:00 UTC.",
            f"{self.NEXT}2026-02-01 00:00 UTC, and ends at 2026-03-01 00:00 UTC.",
        ]

    def test_an_account_without_usage_has_the_new_periods_from_the_beginning(self, admin_client: Client) -> None:
        assert self.asked(admin_client, None, identifier="acme", timezone="Asia/Tokyo") == []
        acme = Account.objects.get()
        unused = "No billing period was used yet, so the edit applies to all of them. The present one lasts from "
        assert self.asked(admin_client, acme, timezone="Asia/Tokyo", billing_anchor="2026-01-10T00:00") == [
            f"{unused}2026-01-10 00:00 to 2026-02-10 00:00 Asia/Tokyo.",
            f"{self.NEXT}2026-02-10 00:00 Asia/Tokyo, and ends at 2026-03-10 00:00 Asia/Tokyo.",
        ]

    def test_a_row_that_is_added_after_the_first_usage_is_an_edit_too(self, admin_client: Client) -> None:
        spend("acme", "2026-01-15")
        flow()
        assert self.asked(admin_client, None, identifier="acme", timezone="Europe/Berlin") == [
            "The present billing period stays as it is. It ends at 2026-02-01 00:00 UTC.",
            f"{self.NEXT}2026-02-01 01:00 Europe/Berlin, and ends at 2026-03-01 00:00 Europe/Berlin.",
        ]
