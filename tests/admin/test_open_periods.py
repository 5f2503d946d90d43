from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import ADDITION, LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import QuerySet
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits.billing.models import Adjustment, PlanPrice, Report, ReportLine
from ratelimits.billing.reports.closing.close import finalise, home_shard
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.models import Plan
from ratelimits.usage.models import DurabilityGap, PeriodUsage, QuarantinedBatch, ShardState
from tests.admin.test_usage import text, url
from tests.support.reports.invoices import account, spend, token
from tests.support.usage.traffic import at, flow, opened_late

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]


@pytest.mark.parametrize("name", ["acme", "a&b <i>", ""])
def test_staff_see_why_a_period_is_open_and_close_it_by_force(admin_client: Client, name: str) -> None:
    spend(account(name) if name else "", "2025-10-15", 5)
    flow()
    ShardState.objects.update(watermark=at("2025-10-20"))
    page = admin_client.get(url(Report, "open"))
    assert "is complete until 2025-10-20T00:00:00Z" in text(page)
    assert "<i>" not in page.content.decode()
    about: dict[str, Any] = {"customer": token(name), "start": at("2025-10-01")}
    assert "Close by force" in text(admin_client.get(url(Report, "force"), about))
    refused = admin_client.post(url(Report, "force"), {**about, "reason": ""})
    assert refused.status_code == 200
    assert not Report.objects.exists()
    done = admin_client.post(url(Report, "force"), {**about, "reason": "the invoice is due"}, follow=True)
    assert "was finalised" in text(done)
    assert Report.objects.get().account == name
    assert DurabilityGap.objects.get(kind="forced").detail.startswith("admin: the invoice is due (shard ")
    again = admin_client.post(url(Report, "force"), {**about, "reason": "once more"}, follow=True)
    assert "has no open period that starts" in text(again)


def test_the_reasons_are_in_the_language_of_the_reader_and_the_gap_is_not(admin_client: Client) -> None:
    spend("acme", "2025-10-15", 5)
    flow()
    ShardState.objects.update(watermark=at("2025-10-20"))
    chinese = {"headers": {"accept-language": "zh-hans"}}
    page = admin_client.get(url(Report, "open"), **chinese)  # type: ignore[arg-type]
    assert f"分片 {home_shard('acme'):02d} 的用量完整至 2025-10-20T00:00:00Z" in text(page)
    values: dict[str, Any] = {"customer": token(), "start": at("2025-10-01"), "reason": "x"}
    admin_client.post(url(Report, "force"), values, **chinese)  # type: ignore[arg-type]
    assert "is complete until 2025-10-20T00:00:00Z" in DurabilityGap.objects.get(kind="forced").detail


def test_without_open_periods_the_page_says_so(admin_client: Client) -> None:
    assert "No open period of a month that is over was found." in text(admin_client.get(url(Report, "open")))
    for start in ("²", "9" * 20, "-1"):
        assert admin_client.get(url(Report, "force"), {"start": start}).status_code == 200
        assert admin_client.post(url(Report, "force"), {"start": start, "reason": "x"}).status_code == 200


def test_a_quarantined_batch_is_a_link_for_those_who_may_see_it(admin_client: Client, client: Client) -> None:
    spend(account(), "2025-10-15", 5)
    flow()
    shard = home_shard("acme")
    ShardState.objects.filter(shard=shard).update(frozen=True)
    for number in (shard, shard + 1):
        QuarantinedBatch.objects.create(shard=number, name="1:1", reason="it came again", content="0" * 64)
    page = admin_client.get(url(Report, "open")).content.decode()
    (link,) = re.findall(f'<a href="([^"]*)">Quarantined batches of shard {shard:02d}</a>', page)
    listed = admin_client.get(unescape(link)).context["cl"].result_list
    assert [str(each) for each in listed] == [f"{shard:02d}:1:1"]
    user = User.objects.create(username="reader", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_report"))
    client.force_login(user)
    page = client.get(url(Report, "open")).content.decode()
    assert "has a quarantined batch" in page
    assert "Quarantined batches of shard" not in page


def complete(watermark: str = "2025-11-02") -> None:
    """Bring all usage to the ledger, so that it is complete until a moment."""
    opened_late()
    flow()
    ShardState.objects.update(watermark=at(watermark))


def verified() -> list[str]:
    """Return what verification finds wrong with the reports."""
    return [finding for report in Report.objects.order_by("pk") for finding in verify_report(report)]


def chosen(page: Any) -> list[str]:
    """Return the values of the boxes on the page of open periods."""
    return [unescape(value) for value in re.findall(r'name="period" value="([^"]*)"', page.content.decode())]


def confirmed(client: Client, page: Any) -> Any:
    """Post what the page with the preview has in its form."""
    inputs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', page.content.decode())
    typed: dict[str, list[str]] = {}
    for name, value in inputs:
        if name != "csrfmiddlewaretoken":
            typed.setdefault(name, []).append(unescape(value))
    return client.post(url(Report, "finalise"), typed, follow=True)


class TestFinalise:
    @pytest.fixture(autouse=True)
    def usage(self) -> None:
        """Two accounts with complete usage of October, one of them with a price, and one with incomplete usage."""
        acme = account("acme", included=5)
        assert acme.plan is not None
        acme.plan.currency = "EUR"
        acme.plan.save()
        acme.plan.prices.create(meter="requests", unit_price="0.25")
        for model in (Plan, PlanPrice):
            QuerySet(model).update(since=0)
            model.history.update(since=0)
        spend(acme, "2025-10-15", 7)
        spend("", "2025-10-16", 3)
        spend("late", "2025-10-17", 4)
        assert len({home_shard(name) for name in ("acme", "", "late")}) == 3
        complete()
        ShardState.objects.filter(shard=home_shard("late")).update(watermark=at("2025-10-20"))

    def test_chosen_periods_are_finalised_as_a_preview_has_shown_them(
        self, admin_client: Client, admin_user: User
    ) -> None:
        page = admin_client.get(url(Report, "open"))
        assert "usage so far (provisional)" in text(page)
        values = chosen(page)
        start = at("2025-10-01")
        assert values == [f"{start}:{token('')}", f"{start}:{token()}"]
        asked = admin_client.post(url(Report, "finalise"), {"period": values})
        said = text(asked)
        assert "Nothing is finalised yet: all numbers are provisional." in said
        assert "acme, October 2025 (2025-10-01 – 2025-11-01 UTC) (provisional)" in said
        assert "requests 7 0 5 2 0.5 EUR" in said
        assert "Owed for this report: 0.50 EUR" in said
        assert "requests 3 0 0 3" in said
        assert not Report.objects.exists()
        assert not ReportLine.objects.exists()
        assert not PeriodUsage.objects.exclude(covered=None).exists()
        done = confirmed(admin_client, asked)
        assert "2 reports were finalised: " in text(done)
        assert [str(report) for report in Report.objects.order_by("account")] == [
            "anonymous 2025-10 v1",
            "acme 2025-10 v1",
        ]
        line = ReportLine.objects.get(report__account="acme")
        assert (line.consumed_quantity, line.included_quantity, line.overage_quantity) == (7, 5, 2)
        assert LogEntry.objects.filter(user=admin_user, action_flag=ADDITION).count() == 2
        assert chosen(done) == []
        assert verified() == []

    def test_what_has_changed_since_the_preview_is_shown_again(self, admin_client: Client) -> None:
        asked = admin_client.post(url(Report, "finalise"), {"all": "1"})
        spend("", "2025-10-18", 10)
        complete()
        ShardState.objects.filter(shard=home_shard("late")).update(watermark=at("2025-10-20"))
        again = confirmed(admin_client, asked)
        said = text(again)
        assert "1 report was finalised: acme 2025-10 v1." in said
        assert "The reports would now differ from the reports that you have seen." in said
        assert "requests 13 0 0 13" in said
        assert [report.account for report in Report.objects.all()] == ["acme"]
        assert "1 report was finalised: anonymous 2025-10 v1." in text(confirmed(admin_client, again))

    def test_a_changed_price_is_shown_again_also_if_the_rounded_amount_is_the_same(self, admin_client: Client) -> None:
        asked = admin_client.post(url(Report, "finalise"), {"period": [f"{at('2025-10-01')}:{token()}"]})
        assert "requests 7 0 5 2 0.5 EUR" in text(asked)
        rows: QuerySet[PlanPrice] = QuerySet(PlanPrice)
        rows.update(unit_price="0.251")
        PlanPrice.history.update(unit_price="0.251")
        again = confirmed(admin_client, asked)
        assert "The reports would now differ from the reports that you have seen." in text(again)
        assert "requests 7 0 5 2 0.502 EUR Owed for this report: 0.50 EUR" in text(again)
        assert not Report.objects.exists()

    def test_periods_are_finalised_if_each_request_is_a_transaction(
        self, admin_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        asked = admin_client.post(url(Report, "finalise"), {"period": [f"{at('2025-10-01')}:{token()}"]})
        assert "acme, October 2025 (2025-10-01 – 2025-11-01 UTC) (provisional)" in text(asked)
        assert "1 report was finalised: acme 2025-10 v1." in text(confirmed(admin_client, asked))
        values: dict[str, Any] = {"customer": token("late"), "start": at("2025-10-01"), "reason": "the invoice is due"}
        assert "was finalised" in text(admin_client.post(url(Report, "force"), values, follow=True))
        assert Report.objects.count() == 2

    def test_what_cannot_be_finalised_is_left_open(self, admin_client: Client) -> None:
        start = at("2025-10-01")
        asked = admin_client.post(
            url(Report, "finalise"), {"period": [f"{start}:{token('late')}", f"{start}:{token()}"]}
        )
        assert "These periods cannot be finalised now. The page “Open periods” says why." in text(asked)
        assert "late, 2025-10-01 00:00:00 UTC" in text(asked)
        assert "Finalise 1 report" in asked.content.decode()
        for values in ([], ["x"], ["²:acme"], [f"{'9' * 20}:acme"], [f"{start}:a\0"]):
            page = admin_client.post(url(Report, "finalise"), {"period": values})
            assert "No period is chosen." in text(page)
        page = admin_client.post(url(Report, "finalise"), {"all": "1", "account": "a\0"})
        assert "No period is chosen." in text(page)
        finalise()  # Somebody else is faster.
        done = confirmed(admin_client, asked)
        assert "Not finalised: acme, 2025-10-01 00:00:00 UTC. If the period is still open" in text(done)
        assert Report.objects.filter(account="acme").count() == 1

    def test_an_account_that_cannot_be_closed_does_not_stop_the_others(self, admin_client: Client) -> None:
        asked = admin_client.post(url(Report, "finalise"), {"all": "1"})
        QuerySet(Plan).update(currency="ZZZ")
        Plan.history.update(currency="ZZZ")
        start = at("2025-10-01")
        again = admin_client.post(url(Report, "finalise"), {"period": [f"{start}:{token('')}", f"{start}:{token()}"]})
        assert "The periods of acme cannot be finalised: the server's log says why." in text(again)
        assert "requests 3 0 0 3" in text(again)
        done = confirmed(admin_client, asked)
        assert "The periods of acme cannot be finalised" in text(done)
        assert "1 report was finalised: anonymous 2025-10 v1." in text(done)
        assert [report.account for report in Report.objects.all()] == [""]

    def test_it_needs_its_own_permission(self, client: Client) -> None:
        user = User.objects.create(username="finance", is_staff=True)
        client.force_login(user)
        values = {"period": [f"{at('2025-10-01')}:{token()}"]}
        others = Permission.objects.exclude(codename="finalise")
        user.user_permissions.set(others)
        page = client.get(url(Report, "open"))
        assert (chosen(page), "report/finalise/" in page.content.decode()) == ([], False)
        assert client.post(url(Report, "finalise"), values).status_code == 403
        assert client.get(url(Report, "force")).status_code == 403
        adjustments = client.get(url(Adjustment)).content.decode()
        assert 'value="finalise"' not in adjustments
        assert not Report.objects.exists()
        user.user_permissions.set(Permission.objects.filter(codename__in=["finalise", "view_report"]))
        assert len(chosen(client.get(url(Report, "open")))) == 2
        confirmed(client, client.post(url(Report, "finalise"), values))
        assert Report.objects.get().account == "acme"

    def test_late_usage_of_an_earlier_period_is_in_the_preview(self, admin_client: Client, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "LATE_USAGE": "period"}
        finalise()
        spend("acme", "2025-10-31", 2)
        spend("acme", "2025-11-10", 20)
        complete("2025-12-02")
        asked = admin_client.post(url(Report, "finalise"), {"period": [f"{at('2025-11-01')}:{token()}"]})
        assert "requests 20 0 5 15 3.75 EUR" in text(asked)
        assert "requests (correction of an earlier period) 2 0 0 2 0.5 EUR" in text(asked)
        confirmed(admin_client, asked)
        assert Report.objects.latest("pk").line_count == 2
        assert verified() == []


def test_periods_that_are_not_over_are_listed_if_asked_for(admin_client: Client) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    spend("acme", now.isoformat()[:19], 5)
    spend("other", now.isoformat()[:19], 6)
    flow()
    assert "No open period of a month that is over was found." in text(admin_client.get(url(Report, "open")))
    page = admin_client.get(url(Report, "open"), {"running": "1", "account": "acme"})
    assert "5 requests" in text(page)
    assert "6 requests" not in text(page)
    assert "it can be closed from" in text(page)
    assert "?account=acme" not in page.content.decode(), "it cannot be closed by force"
    assert admin_client.get(url(Report, "open"), {"account": "a\0"}).status_code == 200


def test_the_list_of_open_periods_takes_a_fixed_number_of_queries(admin_client: Client) -> None:
    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert "requests" in text(admin_client.get(url(Report, "open")))
        return len(queries)

    spend(account("a0"), "2025-10-15")
    complete()
    before = count()
    for number in range(1, 9):
        spend(account(f"a{number}"), "2025-10-15")
    complete()
    assert len({home_shard(f"a{number}") for number in range(9)}) > 4
    assert count() == before
