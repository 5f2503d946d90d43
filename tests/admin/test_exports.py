from __future__ import annotations

import html
import io
import json
import re
from datetime import timedelta
from typing import Any

import openpyxl
import pytest
from asgiref.sync import sync_to_async
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connections
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.timezone import now

from ratelimits.billing.admin.exports import ReportDownloads
from ratelimits.billing.models import Adjustment, Report
from tests.support.below import SITE
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import flow

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.urls(__name__),
    pytest.mark.usefixtures("fsync_at_once"),
]


class ReportAdmin(ReportDownloads, admin.ModelAdmin):  # type: ignore[type-arg]
    """The reports' page with only its downloads."""


site = admin.AdminSite()
site.register(Report, ReportAdmin)
urlpatterns = [path("admin/", site.urls)]

REPORTS = f"{SITE}/admin/ratelimits_billing/report/"


@pytest.fixture
def report() -> Report:
    """Return the finalised November of one account: 7 requests, 5 of them included."""
    spend(account(included=5), "2026-11-10T12:00", cost=7)
    (report,) = close("2026-12-02")
    return report


def body(response: Any) -> bytes:
    assert response.status_code == 200, response
    assert response.streaming
    return b"".join(response.streaming_content)


def as_printed(**options: str) -> str:
    out = io.StringIO()
    call_command("ratelimits_report", period="2026-11", stdout=out, **options)
    return out.getvalue()


def test_a_report_s_page_has_a_button_for_each_format(admin_client: Client, report: Report) -> None:
    page = admin_client.get(f"{REPORTS}{report.pk}/change/").content.decode()
    for name in ("csv", "xlsx", "json", "cloudevents", "cloudevents-ndjson"):
        assert f'href="{REPORTS}{report.pk}/download/?format={name}"' in page


def test_a_report_is_downloaded_as_it_is_printed(admin_client: Client, report: Report) -> None:
    response = admin_client.get(f"{REPORTS}{report.pk}/download/", {"format": "csv"})
    assert response["Content-Type"] == "text/csv; charset=utf-8"
    assert response["Content-Disposition"] == 'attachment; filename="acme.2026-11.v1.csv"'
    assert body(response).decode() == as_printed()


def test_a_version_is_downloaded_as_it_was(admin_client: Client, admin_user: User, report: Report) -> None:
    before = body(admin_client.get(f"{REPORTS}{report.pk}/download/"))
    Adjustment.objects.create(
        account="acme", period_start="2026-11-01T00:00Z", quantity=-1, reason="goodwill", author=admin_user
    )
    (corrected,) = close()
    assert body(admin_client.get(f"{REPORTS}{report.pk}/download/")) == before
    both = body(admin_client.get(f"{REPORTS}{corrected.pk}/download/"))
    assert both.startswith(before)
    assert len(both.splitlines()) == len(before.splitlines()) + 1


def test_a_workbook_opens(admin_client: Client, report: Report) -> None:
    response = admin_client.get(f"{REPORTS}{report.pk}/download/", {"format": "xlsx"})
    assert openpyxl.load_workbook(io.BytesIO(body(response))).active["E2"].value == "acme"


def test_the_list_offers_a_month_of_all_accounts_provisional_ones_too(admin_client: Client, report: Report) -> None:
    page = admin_client.get(REPORTS).content.decode()
    assert f'action="{REPORTS}download/"' in page
    assert '<option value="xlsx">XLSX</option>' in page
    spend("other", "2026-11-10T12:00")
    flow()
    response = admin_client.get(f"{REPORTS}download/", {"period": "2026-11", "format": "json"})
    assert response["Content-Disposition"] == 'attachment; filename="usage-2026-11.json"'
    lines = json.loads(body(response))["lines"]
    assert [(line["account"], line["status"]) for line in lines] == [("acme", "final"), ("other", "provisional")]
    chosen = {"period": "2026-11", "format": "json", "final": "1"}
    # The file would lack a period, so it is named first, with the reason.
    lacks = admin_client.get(f"{REPORTS}download/", chosen, follow=True).content.decode()
    assert "The file lacks other, November 2026: " in lacks
    (link,) = re.findall(r'href="([^"]*lacking=1)"', lacks)
    final = admin_client.get(html.unescape(link))
    assert final["Content-Disposition"] == 'attachment; filename="usage-2026-11-final.json"'
    assert [line["account"] for line in json.loads(body(final))["lines"]] == ["acme"]


def test_the_month_to_download_is_the_last_that_is_over(admin_client: Client) -> None:
    over = now().replace(day=1) - timedelta(days=1)
    assert f'value="{over:%Y-%m}"' in admin_client.get(REPORTS).content.decode()


def test_what_is_no_month_is_said_above_the_list(admin_client: Client) -> None:
    response = admin_client.get(f"{REPORTS}download/", {"period": "November"}, follow=True)
    assert "write it like 2026-11" in response.content.decode()


@pytest.mark.parametrize("query", ["?format=pdf", "?format="])
def test_what_is_no_format_is_not_found(admin_client: Client, report: Report, query: str) -> None:
    assert admin_client.get(f"{REPORTS}{report.pk}/download/{query}").status_code == 404
    assert admin_client.get(f"{REPORTS}download/{query}&period=2026-11").status_code == 404


def test_what_is_no_report_is_not_found(admin_client: Client) -> None:
    assert admin_client.get(f"{REPORTS}7/download/").status_code == 404


@pytest.mark.parametrize("page", ["{pk}/download/", "download/?period=2026-11"])
def test_who_may_not_view_reports_may_not_download_them(client: Client, report: Report, page: str) -> None:
    url = REPORTS + page.format(pk=report.pk)
    assert client.get(url)["Location"].startswith(f"{SITE}/admin/login/")
    client.force_login(User.objects.create(username="staff", is_staff=True))
    assert client.get(url).status_code == 403
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_report"))
    client.force_login(viewer)
    assert body(client.get(url)).startswith(b"report_id,")


def test_the_whole_is_not_made_before_its_beginning_is_sent(
    admin_client: Client, report: Report, django_assert_num_queries: Any
) -> None:
    response = admin_client.get(f"{REPORTS}{report.pk}/download/")
    with django_assert_num_queries(2):  # one query for its versions, one for the lines of the only version
        body(response)


async def test_under_asgi_it_is_streamed_too(async_client: AsyncClient, admin_user: User, report: Report) -> None:
    await async_client.aforce_login(admin_user)
    response = await async_client.get(f"{REPORTS}{report.pk}/download/", {"format": "json"})
    chunks = [chunk async for chunk in response]  # type: ignore[attr-defined]
    await sync_to_async(connections.close_all)()
    assert json.loads(b"".join(chunks))["lines"][0]["account"] == "acme"
