from __future__ import annotations

import io
import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits import moments
from ratelimits.billing.admin import overview
from ratelimits.billing.admin import reports as pages
from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.exports import DOWNLOADS
from ratelimits.models import Account
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.models import Line
from tests.admin.test_usage import text, url
from tests.support.reports.invoices import account, close, spend
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

ADD = "/admin/ratelimits_billing/adjustment/add/"


@pytest.fixture
def report() -> Report:
    """Return the finalised November of one account: 7 requests, 5 included; process totals have 4 of the 7."""
    monthly = rule("monthly", bills=True)
    spend(account(included=5), "2026-11-10T12:00", cost=7, rule=monthly.pk, version=monthly.version)
    place = TotalKey("admitted", "acme", "", "requests", at("2026-11-10T12:00") // 10**6)
    process_totals.write("p1", {place: (4, 4)})
    (report,) = close("2026-12-02")
    return report


def body(response: Any) -> bytes:
    assert response.status_code == 200, response
    return b"".join(response.streaming_content)


def test_a_report_s_page_says_what_was_billed_what_may_be_missing_and_what_the_cross_check_says(
    admin_client: Client, report: Report
) -> None:
    page = text(admin_client.get(url(Report, "change", report.pk)))
    assert "2026-11-01 00:00:00 UTC" in page
    assert "✗ requests: 1 in the ledger, 4 counted by processes" in page
    assert "witness requests processes=4 ledger=1" in page
    assert report.digest in page


@pytest.mark.parametrize("form", DOWNLOADS.values(), ids=lambda form: form.name)
def test_each_button_downloads_what_the_command_writes(
    admin_client: Client, report: Report, form: Any, tmp_path: Any
) -> None:
    page = admin_client.get(url(Report, "change", report.pk)).content.decode()
    (link,) = re.findall(rf'href="([^"]*/download/\?format={form.name})"', page)
    file = tmp_path / "file"
    call_command("ratelimits_report", period="2026-11", format=form.name, output=str(file), stdout=io.StringIO())
    assert body(admin_client.get(link)) == file.read_bytes()


def test_the_form_above_the_list_downloads_a_month(admin_client: Client, report: Report) -> None:
    page = admin_client.get(url(Report)).content.decode()
    (target,) = re.findall(r'<form method="get" action="([^"]*)"', page)
    assert all(f'name="{name}"' in page for name in ("period", "format"))
    assert 'name="final"' in page
    month = {"period": "2026-11", "format": "csv"}
    final = {**month, "final": "1"}
    assert body(admin_client.get(target, final)).count(b"\n") == 2, "no period is open, so there is nothing to ask"
    spend("other", "2026-11-10T12:00")
    flow()
    assert body(admin_client.get(target, month)).count(b"\n") == 3
    assert "The file lacks other, November 2026: " in text(admin_client.get(target, final, follow=True))
    assert body(admin_client.get(target, {**final, "lacking": "1"})).count(b"\n") == 2


def test_reports_are_found_by_account_and_by_the_month_of_their_own_clocks(admin_client: Client) -> None:
    for name, zone in (("acme", "UTC"), ("tokyo", "Asia/Tokyo"), ("la", "America/Los_Angeles")):
        payer = account(name, timezone=zone)
        spend(payer, "2026-10-15")
        spend(payer, "2026-11-15")
    close("2027-01-01")

    def listed(**query: str) -> set[tuple[str, str]]:
        found = admin_client.get(url(Report), query).context["cl"].result_list
        return {(each.account, each.timezone) for each in found}

    assert len(listed(month="2026-10")) == len(listed(month="2026-11")) == 3
    october = admin_client.get(url(Report), {"month": "2026-10"})
    assert october.context["cl"].result_count == 3
    assert october.context["download_month"] == "2026-10"
    assert listed(month="2026-09") == listed(month="nonsense") == set()
    assert listed(q="tokyo") == {("tokyo", "Asia/Tokyo")}
    assert listed(q="tok") == set()


def test_a_large_report_s_page_shows_its_first_lines(
    admin_client: Client, report: Report, django_assert_max_num_queries: Any
) -> None:
    line = report.lines.get()
    for number in range(2, 260):
        line.pk, line.number, line.key = None, number, f"api_key:{number}"
        line.save(force_insert=True)
    with django_assert_max_num_queries(18):
        page = text(admin_client.get(url(Report, "change", report.pk)))
    assert "api_key:200" in page
    assert "api_key:201" not in page


def test_a_line_s_page_leads_to_who_made_the_rule_and_the_terms_and_to_the_ledger(
    admin_client: Client, report: Report
) -> None:
    line = report.lines.get()
    page = admin_client.get(url(ReportLine, "change", line.pk))
    said = text(page)
    assert "rule “monthly” added" in said
    assert "plan “Plan of acme” added" in said
    ledger, batch = (
        admin_client.get(unescape(re.findall(rf'href="([^"]*{where}[^"]*)"', page.content.decode())[0]))
        for where in (r"/line/\?", r"/batch/\d+/change/")
    )
    assert [found.admitted_units for found in ledger.context["cl"].result_list] == [7]
    assert "ledger lines" in text(batch).lower()


def test_reports_are_verified_by_an_action(admin_client: Client, report: Report, monkeypatch: Any) -> None:
    def verify() -> str:
        answer = admin_client.post(url(Report), {"action": "verify", "_selected_action": [report.pk]}, follow=True)
        return text(answer)

    assert "acme 2026-11 v1 is correct." in verify()
    Line.objects.update(admitted_units=8)
    assert f"line {report.lines.get().line_id} (api_key:1, requests) has consumed_quantity 7" in verify()
    monkeypatch.setattr(pages, "_MAX_VERIFIED", 0)
    assert "is too large for this page: use the command ratelimits_verify" in verify()


def typed(**values: str) -> dict[str, str]:
    start = {"period_start_0": "2026-11-01", "period_start_1": "00:00:00"}
    return {"account": "acme", **start, "meter": "requests", "quantity": "-2", "reason": "goodwill", **values}


def test_a_report_is_adjusted_from_its_page_by_whoever_is_logged_in(
    admin_client: Client, admin_user: User, report: Report
) -> None:
    page = admin_client.get(url(Report, "change", report.pk)).content.decode()
    (link,) = re.findall(r'href="(/admin/ratelimits_billing/adjustment/add/\?[^"]*)"', page)
    form = admin_client.get(unescape(link)).context["adminform"].form
    assert form["account"].value() == "acme"
    assert form["period_start"].value() == moments.untyped(datetime(2026, 11, 1, tzinfo=UTC))
    assert admin_client.post(ADD, typed(_effect_seen="1")).status_code == 302
    made = Adjustment.objects.get()
    assert (made.author, made.quantity, made.report) == (admin_user, -2, None)
    action = {"action": "finalise", "_selected_action": [made.pk]}
    assert "acme 2026-11 v2 was finalised." in text(admin_client.post(url(Adjustment), action, follow=True))
    made.refresh_from_db()
    assert made.report is not None
    assert "is on report acme 2026-11 v2." in text(admin_client.post(url(Adjustment), action, follow=True))
    assert "Save" not in text(admin_client.get(url(Adjustment, "change", made.pk)))
    assert admin_client.post(url(Adjustment, "delete", made.pk), {"post": "yes"}).status_code == 403


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({"quantity": "0"}, "quantity", "changes nothing"),
        ({"reason": ""}, "reason", "required"),
        (
            {"period_start_0": "2026-11-05"},
            "period_start",
            "The period that contains this moment starts at 2026-11-01 00:00:00 UTC",
        ),
        ({"period_start_0": ""}, "period_start", "required"),
        ({"account": "acmee"}, "period_start", "This account has no usage in this period"),
        ({"corrects_line_id": "0" * 32}, "corrects_line_id", "No report of this account has this line"),
    ],
)
def test_an_adjustment_that_no_report_could_have_is_refused_at_its_field(
    admin_client: Client, report: Report, values: dict[str, str], field: str, said: str
) -> None:
    errors = admin_client.post(ADD, typed(**values)).context["adminform"].form.errors
    assert list(errors) == [field]
    assert said in str(errors[field])
    assert not Adjustment.objects.exists()


def test_a_link_with_nonsense_in_it_opens_an_empty_form(admin_client: Client) -> None:
    assert admin_client.get(ADD, {"period_start": "soon", "account": "acme"}).status_code == 200


def test_who_may_not_adjust_is_offered_no_adjustment(client: Client, report: Report) -> None:
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_report"))
    client.force_login(viewer)
    page = client.get(url(Report, "change", report.pk)).content.decode()
    assert "adjustment/add" not in page
    assert "api_key:1" not in page, "lines are for who may view lines"
    assert client.get(ADD).status_code == 403


class TestTotals:
    @pytest.fixture
    def versions(self, report: Report) -> list[Report]:
        """Return two versions of November: 7 requests, then 3 late ones; and let December have two meters."""
        spend(Account.objects.get(), "2026-11-30", cost=3)
        (later,) = close("2026-12-03")
        spend(Account.objects.get(), "2026-12-05", cost=4)
        spend(Account.objects.get(), "2026-12-06", cost=90, meter="tokens")
        close("2027-01-02")
        return [report, later]

    def test_the_list_shows_them_by_meter_up_to_each_version(
        self, admin_client: Client, versions: list[Report]
    ) -> None:
        page = text(admin_client.get(url(Report)))
        for row in (
            "December 2026 (2026-12-01 – 2027-01-01 UTC) 1 4 requests 90 tokens, 90 of them overage",
            "November 2026 (2026-11-01 – 2026-12-01 UTC) 2 10 requests, 5 of them overage",
            "November 2026 (2026-11-01 – 2026-12-01 UTC) 1 (newest: 2) 7 requests, 2 of them overage",
        ):
            assert row in page

    def test_the_list_takes_a_fixed_number_of_queries(self, admin_client: Client, versions: list[Report]) -> None:
        def count(listed: int, **query: str) -> int:
            with CaptureQueriesContext(connection) as queries:
                assert admin_client.get(url(Report), query).context["cl"].result_count == listed
            return len(queries)

        assert count(1, version="2") == count(3)

    def test_a_list_of_very_many_lines_leaves_some_to_their_pages(
        self, admin_client: Client, versions: list[Report], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(overview, "MAX_ADDED", 3)
        page = text(admin_client.get(url(Report)))
        assert "90 tokens, 90 of them overage" in page
        assert "1 (newest: 2) 7 requests, 2 of them overage" in page
        assert "UTC) 2 too many lines: see the page of the report" in page

    def test_a_page_has_them_for_each_meter_and_links_the_other_versions_and_periods(
        self, admin_client: Client, versions: list[Report]
    ) -> None:
        first, later = versions
        page = admin_client.get(url(Report, "change", later.pk))
        said = text(page)
        assert "up to this version meter consumed refunded included overage billed requests 10 0 5 5 10" in said
        assert "this version alone meter consumed refunded included overage billed requests 3 0 0 3 3" in said
        assert f'<a href="{url(Report, "change", first.pk)}">version 1, finalised on' in page.content.decode()
        assert re.search(r"version 2, finalised on \S+ \(this version, the newest\)", said)
        december = url(Report, "change", Report.objects.get(period_start=at("2026-12-01")).pk)
        assert f'<a href="{december}">December 2026 (2026-12-01 – 2027-01-01 UTC)</a>' in page.content.decode()
        (every,) = re.findall(r'<a href="([^"]*)">All reports of this account', page.content.decode())
        assert admin_client.get(unescape(every)).context["cl"].result_count == 3
        old = admin_client.get(url(Report, "change", first.pk))
        assert "requests 7 0 5 2 7" in text(old)
        assert f'<a href="{url(Report, "change", later.pk)}">version 2' in old.content.decode()


def test_a_period_is_shown_by_its_own_clock(admin_client: Client) -> None:
    spend(account("tokyo", timezone="Asia/Tokyo"), "2026-11-10")
    spend(account("six", billing_anchor="2026-01-15T06:00"), "2026-11-10")
    close("2026-12-20")
    page = text(admin_client.get(url(Report)))
    assert "2026-11-01 – 2026-12-01 Asia/Tokyo" in page
    assert "2026-10-15 06:00 – 2026-11-15 06:00 UTC" in page
    Report.objects.filter(account="tokyo").update(timezone="Mars/Base")
    assert "2026-10-31 15:00 – 2026-11-30 15:00 UTC" in text(admin_client.get(url(Report)))
